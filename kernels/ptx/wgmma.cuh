// Warpgroup matrix multiply of sm_90a (PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
#pragma once
#include "ptx/types.cuh"

// Descriptor of a tile in shared memory, 1024-byte aligned, of panels [rows][kSwizzleBytes]: address, stride from panel to panel
// (read only where rows run along k), eight rows, swizzle. Stepped by adding to its low word: `descriptor_step`.
template <int kSwizzleBytes> DEV u64 wgmma_descriptor(u32 address, u32 panel_bytes) {
  constexpr u64 kSwizzle = kSwizzleBytes == 128 ? 1 : kSwizzleBytes == 64 ? 2 : 3;
  return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(kSwizzleBytes * 8 >> 4) << 32 | kSwizzle << 62;
}
DEV u64 descriptor_step(u64 descriptor, u32 bytes) {
  return (descriptor & 0xffffffff00000000ull) | (u32)((u32)descriptor + (bytes >> 4));
}

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }
// Accumulators of a group that has been waited for: nothing that reads them moves above this.
template <int kSize> DEV void wgmma_pin(float (&d)[kSize]) {
  #pragma unroll
  for (int i = 0; i < kSize; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// d (64 x N) = a (64 x 16) * b (16 x N), or += where `add`. Thread t of the warpgroup holds d[i] of row t/32*16 + t%32/4 +
// 8*(i/2%2), column i/4*8 + t%4*2 + i%2; a in registers has the layout of mma_m16n8k16. _ss: a and b in shared memory, both
// with k contiguous; _ss_trans: b with N contiguous; _ss_at: a with M contiguous. _rs: a in registers, b with N contiguous.
// Trap: d and a are off limits until the group has been waited for.
template <typename T, int kSize> DEV void wgmma_ss(float (&d)[kSize], u64 a, u64 b, bool add);
template <typename T, int kSize> DEV void wgmma_ss_trans(float (&d)[kSize], u64 a, u64 b, bool add);
template <typename T, int kSize> DEV void wgmma_ss_at(float (&d)[kSize], u64 a, u64 b, bool add);
template <typename T, int kSize> DEV void wgmma_rs(float (&d)[kSize], const u32 (&a)[4], u64 b, bool add);

#define WGMMA_NAMES_24 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_SUMS_24 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
    "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), \
    "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_32 WGMMA_SUMS_24, \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_SUMS_40 WGMMA_SUMS_32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", " \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_SUMS_48 WGMMA_SUMS_40, \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_NAMES_64 WGMMA_NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_64 WGMMA_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_NAMES_96 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_SUMS_96 WGMMA_SUMS_64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_NAMES_128 WGMMA_NAMES_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SUMS_128 WGMMA_SUMS_96, \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define WGMMA_SS(name, T, type, n, regs, a_name, b_name, add_name, a_trans, b_trans)                                            \
  template <> DEV void name<T, regs>(float (&d)[regs], u64 a, u64 b, bool add) {                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_name ", 0;\n"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_NAMES_##regs "}, " a_name ", "     \
                 b_name ", p, 1, 1, " a_trans ", " b_trans ";\n}"                                                            \
                 : WGMMA_SUMS_##regs : "l"(a), "l"(b), "r"((int)add) : "memory");                                              \
  }
#define WGMMA(T, type, n, regs, r0, r1, r2, r3, r4, r5)                                                                        \
  WGMMA_SS(wgmma_ss, T, type, n, regs, r0, r1, r2, "0", "0")                                                                   \
  WGMMA_SS(wgmma_ss_trans, T, type, n, regs, r0, r1, r2, "0", "1")                                                             \
  template <> DEV void wgmma_rs<T, regs>(float (&d)[regs], const u32 (&a)[4], u64 b, bool add) {                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " r5 ", 0;\n"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_NAMES_##regs "}, {" r0 ", " r1       \
                 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, 1;\n}"                                                                   \
                 : WGMMA_SUMS_##regs : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory");           \
  }
#define WGMMA_TYPES(n, regs, ...) WGMMA(half, "f16", n, regs, __VA_ARGS__) WGMMA(bf16, "bf16", n, regs, __VA_ARGS__)
WGMMA_TYPES(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_TYPES(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
WGMMA_SS(wgmma_ss_at, half, "f16", 80, 40, "%40", "%41", "%42", "1", "0")
WGMMA_SS(wgmma_ss_at, bf16, "bf16", 80, 40, "%40", "%41", "%42", "1", "0")
#undef WGMMA_TYPES
#undef WGMMA
#undef WGMMA_SS
