// One kernel: its file KERNEL_FILE, its name KERNEL, the type PARAMS of its argument.
#include KERNEL_FILE

void run_blocks(void (*)(const void*), const void*, int, int, int);

extern "C" void run(const void* params, int blocks, int threads, int step) {
  run_blocks([](const void* p) { KERNEL(*(const PARAMS*)p); }, params, blocks, threads, step);
}
