// Instructions for Hopper (sm_90a) that CUDA C++ does not expose. `megafp8/kernels/grouped_gemm_cuda.py` puts this file
// before the source of each kernel. Macros: A_TYPE and B_TYPE are the formats of the tensor cores' operands, "e4m3" or
// "e5m2"; RESULT_TYPE is "bf16", "f16" or, for sums over rows, "f32". BLOCK_SCALES is 1 if blocks of operands have
// scales, and 0 if each expert has one; FAST_SUMS is 1 if sums stay in the tensor cores, which needs one scale.

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { u64 words[16]; };

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Returns whether this thread is the one that acts for its warp. The compiler knows that there is only one; with other
// conditions, it would issue copies in a loop over threads.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.b32 %0, 1, 0, one;\n}" : "=r"(chosen));
    return chosen;
}

// Computed again each time, so that values derived from it occupy no register in between.
__device__ __forceinline__ int own_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Tells the compiler that all threads of a warp have the same number.
__device__ __forceinline__ int same(int x) { return __shfl_sync(0xffffffff, x, 0); }

// Synchronizes all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialized barriers visible to the copy engines of the cluster.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n.reg .pred passed;\nmbarrier.try_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
        "selp.b32 %0, 1, 0, passed;\n}" : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
    return passed;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of multiprocessor `rank` of the cluster. With `.release.cluster`, the warp would wait until
// all of its stores are visible to the GPU; this is not needed, because the warp has only read.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// Copies a box of a matrix to shared memory.
__device__ __forceinline__ void copy_box(const TensorMap* map, u32 to, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// Copies a box to the same address in both multiprocessors of the cluster; the barriers at `barrier` of both count it.
__device__ __forceinline__ void copy_box_to_both(const TensorMap* map, u32 to, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier),
        "h"((unsigned short)3) : "memory");
}

// Copies `bytes` bytes of scales, starting at a multiple of 16.
__device__ __forceinline__ void copy_scales(u32 to, const float* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Stores a box of shared memory to a matrix. The thread can wait for its stores once they are committed.
__device__ __forceinline__ void begin_store_box(const TensorMap* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(from) : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's stores have read shared memory, except for the LEFT stores that were committed last.
template <int LEFT = 0>
__device__ __forceinline__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Makes the thread's writes to shared memory visible to copies.
__device__ __forceinline__ void fence_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float load_float(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ float2 load_floats(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ void store_floats(u32 at, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ int4 load_16_bytes(u32 at) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_note(u32 at, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// The compiler does not move this load across other such instructions, so that it is in flight while the thread waits.
__device__ __forceinline__ float load_scale(const float* p) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}

// Returns x / y as Triton divides, with an error of up to 2 units in the last place.
__device__ __forceinline__ float quotient(float x, float y) {
    float q;
    asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
    return q;
}

// Returns where an operand of the tensor cores begins, in units of 16 bytes. The upper bits of an address in the
// cluster contain the multiprocessor's rank and are removed.
__device__ __forceinline__ u32 operand_at(u32 address) { return (address & 0x3ffff) >> 4; }

// Describes swizzled rows of 128 bytes in shared memory; groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 operand(u32 at) { return 0x4000004000010000ull | at; }

// begin_product(product, x, y) starts x · yᵀ for 64 rows of a and 2 · (size of product) rows of b, with 128 summands.
// add_product(product, x, y) starts the same product and adds it to `product` in the tensor cores. An instruction
// multiplies 32 summands; the next 32 summands are 32 bytes further.
#define PLACES_64                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_128                                                                                                     \
    PLACES_64                                                                                                          \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                               \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_192                                                                                                     \
    PLACES_128                                                                                                         \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                               \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS4(HOW, i) HOW "f"(product[i]), HOW "f"(product[i + 1]), HOW "f"(product[i + 2]), HOW "f"(product[i + 3])
#define SUMS16(HOW, i) SUMS4(HOW, i), SUMS4(HOW, i + 4), SUMS4(HOW, i + 8), SUMS4(HOW, i + 12)
#define SUMS_64(HOW) SUMS16(HOW, 0), SUMS16(HOW, 16)
#define SUMS_128(HOW) SUMS_64(HOW), SUMS16(HOW, 32), SUMS16(HOW, 48)
#define SUMS_192(HOW) SUMS_128(HOW), SUMS16(HOW, 64), SUMS16(HOW, 80)
#define MULTIPLY(COLUMNS, ADD)                                                                                         \
    "setp.ne.b32 add, " ADD ", 0;\n"                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." A_TYPE "." B_TYPE " {" PLACES_##COLUMNS                    \
    "}, x, y, add, 1, 1;\n"
#define STEP "add.s64 x, x, 2;\nadd.s64 y, y, 2;\n"
// HOW is "=" if the product is only written; FIRST is whether the first instruction adds. X and Y are the operand
// numbers of x and y, which follow the operands of the product.
#define PRODUCT(NAME, HOW, FIRST, COLUMNS, X, Y)                                                                       \
    __device__ __forceinline__ void NAME(float (&product)[COLUMNS / 2], u64 x, u64 y) {                                \
        asm volatile(                                                                                                  \
            "{\n.reg .pred add;\n.reg .b64 x, y;\nwgmma.fence.sync.aligned;\nmov.b64 x, %" #X ";\nmov.b64 y, %" #Y     \
            ";\n" MULTIPLY(COLUMNS, FIRST) STEP MULTIPLY(COLUMNS, "1") STEP MULTIPLY(COLUMNS, "1")                     \
            STEP MULTIPLY(COLUMNS, "1") "wgmma.commit_group.sync.aligned;\n}"                                          \
            : SUMS_##COLUMNS(HOW) : "l"(x), "l"(y) : "memory");                                                        \
    }
#define PRODUCTS(COLUMNS, X, Y)                                                                                        \
    PRODUCT(begin_product, "=", "0", COLUMNS, X, Y)                                                                    \
    PRODUCT(add_product, "+", "1", COLUMNS, X, Y)
PRODUCTS(64, 32, 33)
PRODUCTS(128, 64, 65)
PRODUCTS(192, 96, 97)

// Waits until all started products are computed, except for the last LEFT.
template <int LEFT = 0>
__device__ __forceinline__ void wait_product() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from reading the product before this point.
template <int SIZE>
__device__ __forceinline__ void computed(float (&product)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(product[i])::"memory");
}

// Rounds two numbers to 16 bits and packs them into one word.
__device__ __forceinline__ u32 two_results(float low, float high) {
    u32 x;
    asm("cvt.rn." RESULT_TYPE "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

// Stores a thread's 8 sums of 16 rows and 16 columns as 16-bit numbers. The lanes have the addresses of the rows in
// shared memory: 16 rows of the first 8 columns, then 16 rows of the other 8 columns.
__device__ __forceinline__ void store_results(u32 to, const float* sums) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(two_results(sums[0], sums[1])), "r"(two_results(sums[2], sums[3])),
                 "r"(two_results(sums[4], sums[5])), "r"(two_results(sums[6], sums[7])) : "memory");
}

// Registers of a thread. The three warpgroups together must not use more registers than a multiprocessor has.
__device__ __forceinline__ void few_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ __forceinline__ void many_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

// Position in a ring of stages in shared memory; `parity` is the parity of the stage's round.
template <int STAGES>
struct RingOf {
    u32 stage, parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Initializes the barriers of a ring; all threads of the cluster call it. A stage is full when the bytes that the
// producer expects have arrived, and empty when `readers` warps of the cluster have arrived.
template <int STAGES>
__device__ __forceinline__ void make_barriers(u32 full, u32 empty, u32 readers) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, readers);
        }
        fence_barriers();
    }
    cluster_sync();
}
