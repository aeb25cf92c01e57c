// Runs the blocks of a launch one after the other.
#include "lanes.h"

Thread* current;
Meeting warp_meetings[32], block_meeting;
Index blockIdx, gridDim, blockDim;
alignas(1024) unsigned char smem[1 << 18];

static ucontext_t outside;
static std::vector<Thread> threads;
static int at, step;            // which thread runs; the next is `step` further, so that orders differ
static void (*body_of_thread)(const void*);
static const void* argument;
constexpr int kStack = 1 << 17;

static bool turn() {
  for (size_t i = 0; i < threads.size(); i++) {
    at = (at + step) % threads.size();
    if (!threads[at].done) return current = &threads[at], true;
  }
  return false;
}
static void go_on() {
  if (current->has_started) _longjmp(current->place, 1);
  current->has_started = true;
  setcontext(&current->context);
}
void yield() {
  Thread* before = current;
  if (turn() && current != before && !_setjmp(before->place)) go_on();
}
static void start() {
  body_of_thread(argument);
  current->done = true;
  if (turn()) go_on();
  setcontext(&outside);
}

void run_blocks(void (*body)(const void*), const void* given, int blocks, int num_threads, int steps) {
  static std::vector<char> stacks;
  stacks.resize((size_t)num_threads * kStack);
  body_of_thread = body, argument = given, step = steps;
  gridDim = {(u32)blocks, 1, 1}, blockDim = {(u32)num_threads, 1, 1};
  for (int block = 0; block < blocks; block++) {
    blockIdx = {(u32)block, 0, 0};
    memset(smem, 0xff, sizeof smem);            // NaN
    memset(warp_meetings, 0, sizeof warp_meetings);
    memset(&block_meeting, 0, sizeof block_meeting);
    threads = std::vector<Thread>(num_threads);
    for (int i = 0; i < num_threads; i++) {
      Thread& t = threads[i];
      getcontext(&t.context);
      t.index = {(u32)i, 0, 0}, t.has_started = t.done = false;
      t.context.uc_stack.ss_sp = stacks.data() + (size_t)i * kStack;
      t.context.uc_stack.ss_size = kStack;
      makecontext(&t.context, start, 0);
    }
    at = 0, current = &threads[0], current->has_started = true;
    swapcontext(&outside, &current->context);
  }
}
