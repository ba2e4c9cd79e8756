// Sums over each expert's rows of outer products, for Hopper (sm_90a): weight gradients.
//
//     out[i, j] = sum over blocks of 128 rows of (a[i, block] · b[j, block]) · b_scale_inv · a_scale_inv  (+ out[i, j])
//
// a `[p, rows]` and b `[q, rows]` are FP8. They contain the rows of all experts side by side, each expert's rows padded
// with zeros to a multiple of 128. out `[e·p, q]` contains one expert after the other, in fp32, or in bf16 or fp16 if
// nothing is added to it. The rows of an earlier micro-batch, which has separate operands, come first.
// `megafp8/kernels/grouped_gemm_cuda.py` compiles and launches this file, after `hopper.cuh`. Macros: RESULT_BYTES is 4
// or 2; B_BOX_ROWS is half of the columns of a tile; the others are the parameters of a launch (asserted below).
//
// With BLOCK_SCALES, each block of 1 × 128 has a scale, and p and q are multiples of 128. Otherwise, each expert has one
// scale for a and one for b, which multiply the sums. p and q are then multiples of 16: tiles may reach beyond q, where
// the copy engine reads zeros and stores nothing, and beyond p, where the rows of the next expert begin. Sums there are
// not stored. Sums of the earlier micro-batch are converted to the scales of the other one.
//
// The problem is the same as in `grouped_gemm_cuda.cu`. In addition, each column of a tile may have a separate scale,
// which threads read from shared memory. If experts have few rows, reading and writing fp32 sums takes longer than
// products.
//
// *Roles*, *clusters* and *units* are the same as in `grouped_gemm_cuda.cu`. Tiles are 128 × 192, or 128 × 128 for
// experts with few rows: results then take 2 of 6 stages (7 without scales of blocks) instead of 3 of 5, which leaves 4
// (5) stages instead of 2 for operands of the next tile. A consumer has half of the rows and all columns of a tile.
// With half of the columns and all rows, it would read half the number of scales, but products would be half as wide,
// so that both consumers would read all of a. A block of 128 × 192 takes the tensor cores 768 cycles. In these they
// would read shared memory for 640 cycles instead of 512, while copies write to it for 330. That was 4 to 16% slower.
// Reads of scales wait for free cycles, while the other consumer's products run.
//
// *Results* pass through stages of the ring. After a tile's last block, the producer hands out a stage for each 64
// columns of the tile, and copies the old sums into it. Consumers add their sums there, the copy engine stores them
// from there, and consumers go on with the next tile. They free such a stage after they have started their next
// product. An expert without rows has only results: zeros, or none if sums are added.

constexpr int BLOCK = 128;        // rows that share a scale, read at once; rows of a tile
constexpr int SIDE = 64;          // rows of a product
constexpr int HALF = B_BOX_ROWS;  // columns that one multiprocessor copies for both
constexpr int WIDTH = 2 * HALF;   // columns of a tile
constexpr int PART = 64;          // columns of results in a stage
constexpr int WIDTH_STEP = WIDTH > 128 ? PART : WIDTH;  // widths of tiles are multiples of it
constexpr int BOX = 32;           // columns of results that are copied at once
constexpr int STAGES = WIDTH > 128 ? 5 : BLOCK_SCALES ? 6 : 7;  // blocks or parts of results in shared memory
constexpr int MOST_PARTS = 4;     // more than the parts of a tile
constexpr int GROUP = 8;          // units computed down a column before the next column, for the L2 cache
constexpr int CLUSTER = 2;        // multiprocessors in a cluster
constexpr int CONSUMER_WARPS = 8;
constexpr int THREADS = 384;      // three warpgroups, because registers are assigned per warpgroup; the last produces

constexpr int A_BYTES = BLOCK * BLOCK, B_BYTES = WIDTH * BLOCK, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int A_SCALE_BYTES = BLOCK_SCALES ? BLOCK * 4 : 0, SCALE_BYTES = BLOCK_SCALES ? A_SCALE_BYTES + WIDTH * 4 : 0;
constexpr int BOX_BYTES = SIDE * BOX * 4;  // half of the rows, in fp32; a stage has two boxes for each consumer
static_assert(4 * BOX_BYTES <= STAGE_BYTES && WIDTH / PART < STAGES, "");

// Offsets in shared memory. Operands and boxes begin at multiples of 1024, as swizzling requires.
constexpr int SCALES_AT = STAGES * STAGE_BYTES;
constexpr int NOTES_AT = SCALES_AT + STAGES * SCALE_BYTES;
constexpr int FULL_AT = NOTES_AT + STAGES * 16;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
static_assert(EMPTY_AT + STAGES * 8 <= LAUNCHED_SHARED_BYTES && CLUSTER == LAUNCHED_CLUSTER, "");
static_assert(!BLOCK_SCALES || !FAST_SUMS, "");
static_assert(THREADS == LAUNCHED_THREADS && BLOCK == A_BOX_ROWS, "");
static_assert(SIDE == ADDED_BOX_ROWS && SIDE / 4 == STORED_BOX_ROWS && BOX == BOX_COLUMNS, "");

// Operands of a micro-batch.
struct Operands {
    TensorMap a, b;
    const float *a_scale_inv, *b_scale_inv;
    const int* ends_e;       // ends of the experts' rows, or null if there is no such micro-batch
    int a_stride, b_stride;  // strides of scales along blocks of rows, or along experts
};

struct Sizes { int p, q, experts, accumulate; };

// --- tiles -----------------------------------------------------------------------------------------------------------

// Iterates over the units of a cluster, expert by expert. A unit is two tiles one above the other, which share b. If
// the number of tile rows is odd, the units of the last row are two tiles side by side.
//
// Most units are whole: two tiles with all columns. They are assigned to the clusters in turn. Small units, which are
// narrower or have one tile, are also assigned in turn, but from the last cluster backwards, so that clusters with one
// whole unit fewer get one small unit more.
struct Walk {
    int clusters, rank;
    Sizes sizes;
    const int *ends_e, *earlier_ends_e;
    int full_columns, across;                 // number of tile columns of full width, and of all tile columns
    int pairs, left;                          // number of pairs of tile rows, and of tile rows left over, 0 or 1
    int expert, first, stop;                  // the expert's blocks of rows
    int earlier_first, earlier_stop;          // the expert's blocks of rows in the earlier micro-batch
    int whole_first, whole_stop, whole_next;  // the expert's whole units, and the cluster's next one
    int small_first, small_stop, small_next;
    int row, column, width;                   // the tile
    int parts;                                // stages that the results of the unit's wider tile pass through
    bool shared, idle;                        // whether both tiles have the same rows of b; whether there is no tile

    __device__ Walk(const int* ends_e, const int* earlier_ends_e, const Sizes& sizes, int clusters, int cluster,
                    int rank)
        : clusters(clusters), rank(rank), sizes(sizes), ends_e(ends_e), earlier_ends_e(earlier_ends_e),
          full_columns(sizes.q / WIDTH), across((sizes.q + WIDTH - 1) / WIDTH),
          pairs((sizes.p + BLOCK - 1) / BLOCK / 2), left((sizes.p + BLOCK - 1) / BLOCK % 2), expert(-1), first(0),
          stop(0), earlier_first(0), earlier_stop(0), whole_stop(0), whole_next(cluster), small_stop(0),
          small_next(clusters - 1 - cluster) {}

    __device__ int earlier_blocks() const { return earlier_stop - earlier_first; }
    __device__ int blocks() const { return stop - first + earlier_blocks(); }

    __device__ void next_expert() {
        first = stop;
        stop = ends_e[++expert] / BLOCK;
        earlier_first = earlier_stop;
        if (earlier_ends_e) earlier_stop = earlier_ends_e[expert] / BLOCK;
        whole_first = whole_stop;
        small_first = small_stop;
        if (sizes.accumulate && blocks() == 0) return;
        whole_stop += pairs * full_columns + left * (across / 2);
        small_stop += pairs * (across - full_columns) + left * (across % 2);
    }

    __device__ void place_whole(int index) {
        if (index < pairs * full_columns) {
            const int group = index / (GROUP * full_columns), within = index % (GROUP * full_columns);
            const int height = min(pairs - group * GROUP, GROUP);
            place(2 * (group * GROUP + within % height) + rank, within / height, true, false);
        } else {
            place(2 * pairs, 2 * (index - pairs * full_columns) + rank, false, false);
            parts = WIDTH / PART;  // parts of the left tile
        }
    }

    __device__ void place_small(int index) {
        if (index < pairs * (across - full_columns))
            place(2 * index + rank, full_columns, true, false);
        else
            place(2 * pairs, across - 1, false, rank > 0);
    }

    __device__ void place(int i, int j, bool of_b, bool none) {
        row = i * BLOCK;
        column = j * WIDTH;
        width = min((sizes.q - column + WIDTH_STEP - 1) / WIDTH_STEP * WIDTH_STEP, WIDTH);
        parts = width / PART;
        shared = of_b;
        idle = none;
    }

    // Goes to the next unit; returns false after the last unit.
    __device__ bool next() {
        while (true) {
            if (whole_next < whole_stop) {
                place_whole(whole_next - whole_first);
                whole_next += clusters;
                return true;
            }
            if (small_next < small_stop) {
                place_small(small_next - small_first);
                small_next += clusters;
                return true;
            }
            if (expert + 1 == sizes.experts) return false;
            next_expert();
        }
    }
};

// --- producer --------------------------------------------------------------------------------------------------------

using Ring = RingOf<STAGES>;

struct Producer {
    const TensorMap* added;  // the results, in boxes with half of the rows of a tile
    u32 memory, rank;
    Ring ring;

    // Waits for a free stage; `bytes` will be copied to it. Notes the tile if `noted`.
    __device__ __forceinline__ u32 begin_stage(const Walk& at, bool noted, u32 bytes) {
        const u32 full = memory + FULL_AT + ring.stage * 8;
        wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
        if (elected()) {
            if (noted)
                store_note(memory + NOTES_AT + ring.stage * 16, at.expert * at.sizes.p + at.row,
                           at.idle ? -1 : at.column, at.blocks(), at.earlier_blocks() * MOST_PARTS + at.parts);
            arrive_and_expect(full, bytes);
        }
        return full;
    }

    // Copies the blocks of rows from `start` to `end`; notes the tile at the first block if `noted`.
    __device__ __forceinline__ void copy_blocks(const Walk& at, const Operands* x, int start, int end, bool noted) {
        const bool second_b = at.width > HALF;
        const u32 b_bytes = second_b ? B_BYTES : B_BYTES / 2, b_scale_bytes = BLOCK_SCALES ? at.width * 4 : 0;
        const u32 bytes = at.idle ? 0 : A_BYTES + b_bytes + A_SCALE_BYTES + b_scale_bytes;
        const float* a_scales = x->a_scale_inv + (long long)start * x->a_stride + at.row;
        const float* b_scales = x->b_scale_inv + (long long)start * x->b_stride + at.column;
#pragma unroll 1
        for (int i = start; i < end; ++i) {
            const u32 full = begin_stage(at, noted && i == start, bytes);
            if (!at.idle && elected()) {
                const u32 a_to = memory + ring.stage * STAGE_BYTES, b_to = a_to + A_BYTES;
                const u32 scales_to = memory + SCALES_AT + ring.stage * SCALE_BYTES;
                copy_box(&x->a, a_to, i * BLOCK, at.row, full);
                if (at.shared) {
                    if (rank == 0 || second_b)
                        copy_box_to_both(&x->b, b_to + rank * (B_BYTES / 2), i * BLOCK, at.column + rank * HALF, full);
                } else {
                    copy_box(&x->b, b_to, i * BLOCK, at.column, full);
                    if (second_b) copy_box(&x->b, b_to + B_BYTES / 2, i * BLOCK, at.column + HALF, full);
                }
                if (BLOCK_SCALES) {
                    copy_scales(scales_to, a_scales, A_SCALE_BYTES, full);
                    copy_scales(scales_to + A_SCALE_BYTES, b_scales, b_scale_bytes, full);
                }
            }
            a_scales += x->a_stride;
            b_scales += x->b_stride;
            ring.next();
        }
    }

    // Hands out stages for results, with the old sums in them.
    __device__ __forceinline__ void copy_added(const Walk& at) {
#pragma unroll 1
        for (int part = 0; part < at.parts; ++part) {
            const bool some = at.sizes.accumulate && !at.idle && part * PART < at.width;
            const u32 full = begin_stage(at, part == 0, some ? 4 * BOX_BYTES : 0);
            if (some && elected()) {
#pragma unroll
                for (int box = 0; box < 4; ++box)
                    copy_box(added, memory + ring.stage * STAGE_BYTES + box * BOX_BYTES,
                             at.column + part * PART + box % 2 * BOX,
                             at.expert * at.sizes.p + at.row + box / 2 * SIDE, full);
            }
            ring.next();
        }
    }

    __device__ __forceinline__ void copy_tiles(const Operands* earlier, const Operands* now, const Sizes& sizes) {
        Walk at(now->ends_e, earlier->ends_e, sizes, gridDim.x / CLUSTER, blockIdx.x / CLUSTER, rank);
        while (at.next()) {
            copy_blocks(at, earlier, at.earlier_first, at.earlier_stop, true);
            copy_blocks(at, now, at.first, at.stop, at.earlier_blocks() == 0);
            copy_added(at);
        }
        wait(memory + EMPTY_AT + ring.stage * 8, ring.parity);
        if (elected()) {
            store_note(memory + NOTES_AT + ring.stage * 16, -1, 0, 0, 0);  // no more tiles
            arrive(memory + FULL_AT + ring.stage * 8);
        }
    }
};

// --- consumers -------------------------------------------------------------------------------------------------------

struct Consumer {
    const TensorMap* out;  // in boxes of a warp's 16 rows
    u32 memory;
    int lane, warp, index;  // warp: within the consumer; index: number of the consumer
    int p;  // rows of an expert's results
    bool accumulate;
    Ring ring;
    u32 stored;   // the first stage from which results are being stored
    int storing;  // number of such stages

    __device__ __forceinline__ void wait_full() { wait(memory + FULL_AT + ring.stage * 8, ring.parity); }

    // Signals that the warp has read its part of the stage.
    __device__ __forceinline__ void release() {
        if (lane < CLUSTER) arrive_at(memory + EMPTY_AT + ring.stage * 8, lane);
    }

    // Signals the same for the first stage from which results are being stored, once they have been read.
    __device__ __forceinline__ void release_stored() {
        if (elected()) {
            if (storing == 1)
                wait_stores_read();
            else if (storing == 2)
                wait_stores_read<1>();
            else
                wait_stores_read<2>();
            for (u32 rank = 0; rank < CLUSTER; ++rank) arrive_at(memory + EMPTY_AT + stored * 8, rank);
        }
        __syncwarp();
        stored = stored + 1 == STAGES ? 0 : stored + 1;
        --storing;
    }

    // Adds product · scales to the sums, for four of the pairs of columns in which a thread has sums of two rows.
    template <int SIZE>
    __device__ __forceinline__ void add_scaled(float (&sums)[SIZE], const float (&product)[SIZE],
                                               const float2 (&columns)[SIZE / 4], int from, float low, float high) {
#pragma unroll
        for (int pair = from; pair < from + 4; ++pair) {
            const int i = pair * 4;
            sums[i] = __fmaf_rn(__fmul_rn(product[i], columns[pair].x), low, sums[i]);
            sums[i + 1] = __fmaf_rn(__fmul_rn(product[i + 1], columns[pair].y), low, sums[i + 1]);
            sums[i + 2] = __fmaf_rn(__fmul_rn(product[i + 2], columns[pair].x), high, sums[i + 2]);
            sums[i + 3] = __fmaf_rn(__fmul_rn(product[i + 3], columns[pair].y), high, sums[i + 3]);
        }
    }

    template <int SIZE>
    __device__ __forceinline__ void multiply_by(float (&sums)[SIZE], float scale) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) sums[i] = __fmul_rn(sums[i], scale);
    }

    // Adds product · scales of one block to the sums. a and b are the consumer's operands in the first stage. row and
    // column are the first ones in which the thread has sums.
    template <int COLUMNS>
    __device__ __forceinline__ void add_block(float (&sums)[COLUMNS / 2], u32 a, u32 b, int row, int column) {
        constexpr int PAIRS = COLUMNS / 8;  // pairs of columns
        float product[COLUMNS / 2];
        float2 columns[PAIRS];
        wait_full();
        const u32 at = ring.stage * (STAGE_BYTES / 16);
        const u32 scales = memory + SCALES_AT + ring.stage * SCALE_BYTES;
        const u32 column_scales = scales + A_SCALE_BYTES + column * 4;
        begin_product(product, operand(a + at), operand(b + at));
        if (storing > 0) release_stored();
        const float low = load_float(scales + row * 4), high = load_float(scales + (row + 8) * 4);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) columns[pair] = load_floats(column_scales + pair * 32);
        wait_product();
        computed(product);
#pragma unroll
        for (int from = 0; from < PAIRS; from += 4) {
            add_scaled(sums, product, columns, from, low, high);
            if (from + 4 < PAIRS)  // registers for the next columns are free now
#pragma unroll
                for (int pair = from + 4; pair < from + 8; ++pair)
                    columns[pair] = load_floats(column_scales + pair * 32);
            if (from + 8 == PAIRS) {
                __syncwarp();  // wait until all lanes have read the last scales
                release();
            }
        }
        ring.next();
    }

    // Adds the product of one block to the sums, without scales.
    template <int SIZE>
    __device__ __forceinline__ void add_unscaled(float (&sums)[SIZE], u32 a, u32 b) {
        float product[SIZE];
        wait_full();
        const u32 at = ring.stage * (STAGE_BYTES / 16);
        if constexpr (FAST_SUMS)
            add_product(sums, operand(a + at), operand(b + at));
        else
            begin_product(product, operand(a + at), operand(b + at));
        if (storing > 0) release_stored();
        wait_product();
        if constexpr (FAST_SUMS) {
            computed(sums);
        } else {
            computed(product);
#pragma unroll
            for (int i = 0; i < SIZE; ++i) sums[i] = __fadd_rn(product[i], sums[i]);
        }
        release();
        ring.next();
    }

    // Adds a warp's 16 × 32 sums, multiplied by `scale`, to a box. The box has swizzled rows of 128 bytes: the number
    // of a chunk of 16 bytes is XORed with the number of its row. Odd rows begin with the second half of the columns;
    // otherwise two rows would conflict in a bank.
    __device__ __forceinline__ void add_or_write(u32 box, const float* sums, float scale) {
        const int lane = own_lane(), row = lane / 4, odd = row % 2, pair = lane % 4;
        const u32 to = box + (warp * 16 + row) * 128 + pair % 2 * 8;
        const u32 swizzle = (u32)(odd * 4 ^ pair / 2 ^ row) * 16;
        float2 low[4], high[4];
        if (accumulate) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] = load_floats(to + (i * 32 ^ swizzle));
                high[i] = load_floats(to + (i * 32 ^ swizzle) + 8 * 128);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = odd ? sums[(i ^ 2) * 4 + j] : sums[i * 4 + j];
            if (accumulate) {
                x[0] = __fmaf_rn(x[0], scale, low[i].x);
                x[1] = __fmaf_rn(x[1], scale, low[i].y);
                x[2] = __fmaf_rn(x[2], scale, high[i].x);
                x[3] = __fmaf_rn(x[3], scale, high[i].y);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], scale);
            }
            store_floats(to + (i * 32 ^ swizzle), x[0], x[1]);
            store_floats(to + (i * 32 ^ swizzle) + 8 * 128, x[2], x[3]);
        }
    }

    // Writes the same results as 16-bit numbers. Rows have 64 bytes: the number of a chunk of 16 bytes is XORed with
    // half the number of its row.
    __device__ __forceinline__ void write_16_bits(u32 box, const float* sums, float scale) {
        const int lane = own_lane(), row = lane % 16;
        const u32 to = box + warp * (BOX_BYTES / 4) + row * 64, chunk = (lane / 16 ^ row / 2 % 4) * 16;
        float x[BOX / 2];
#pragma unroll
        for (int i = 0; i < BOX / 2; ++i) x[i] = __fmul_rn(sums[i], scale);
        store_results(to + chunk, x);
        store_results(to + (chunk ^ 32), x + 8);
    }

    // Passes the consumer's sums, multiplied by `scale`, through the stages for results.
    template <int COLUMNS>
    __device__ __forceinline__ void store(const float (&sums)[COLUMNS / 2], float scale) {
        while (storing > 0) release_stored();
        stored = ring.stage;
        wait_full();
        const int4 note = load_16_bytes(memory + NOTES_AT + ring.stage * 16);
        const int row = same(note.x) + index * SIDE + warp * 16, column = same(note.y);
        const bool inside = same(note.x) % p + index * SIDE + warp * 16 < p;  // otherwise the next expert's
        const int parts = same(note.w) % MOST_PARTS;
#pragma unroll
        for (int part = 0; part < COLUMNS / PART; ++part) {
            wait_full();
            const u32 boxes = memory + ring.stage * STAGE_BYTES + index * (2 * BOX_BYTES);
#pragma unroll
            for (int box = 0; box < 2; ++box) {
                const float* of_box = &sums[part * (PART / 2) + box * (BOX / 2)];
                if constexpr (RESULT_BYTES == 4)
                    add_or_write(boxes + box * BOX_BYTES, of_box, scale);
                else
                    write_16_bits(boxes + box * BOX_BYTES, of_box, scale);
            }
            fence_written();
            __syncwarp();
            if (elected()) {
#pragma unroll
                for (int box = 0; inside && box < 2; ++box)
                    begin_store_box(out, boxes + box * BOX_BYTES + warp * (BOX_BYTES / 4),
                                    column + part * PART + box * BOX, row);
                commit_stores();
            }
            __syncwarp();
            ++storing;
            ring.next();
        }
        if (parts > COLUMNS / PART) {  // stages for the unit's other tile
            while (storing > 0) release_stored();
            skip(parts - COLUMNS / PART);
        }
    }

    // Computes a tile. `expert` is the number of its expert, whose scales `earlier` and `now` contain.
    template <int COLUMNS>
    __device__ __forceinline__ void tile(u32 a, u32 b, int blocks, int earlier_blocks, int expert,
                                         const Operands& earlier, const Operands& now) {
        float sums[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0.f;
        if constexpr (BLOCK_SCALES) {
            const int row = index * SIDE + warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll 1
            for (int i = 0; i < blocks; ++i) add_block<COLUMNS>(sums, a, b, row, column);
            store<COLUMNS>(sums, 1.f);
        } else {
            const float a_scale = load_scale(now.a_scale_inv + expert * now.a_stride);
            const float b_scale = load_scale(now.b_scale_inv + expert * now.b_stride);
            if (earlier_blocks > 0) {
                const float a_ratio = quotient(load_scale(earlier.a_scale_inv + expert * earlier.a_stride), a_scale);
                const float b_ratio = quotient(load_scale(earlier.b_scale_inv + expert * earlier.b_stride), b_scale);
#pragma unroll 1
                for (int i = 0; i < earlier_blocks; ++i) add_unscaled(sums, a, b);
                multiply_by(sums, a_ratio);
                multiply_by(sums, b_ratio);
            }
#pragma unroll 1
            for (int i = earlier_blocks; i < blocks; ++i) add_unscaled(sums, a, b);
            multiply_by(sums, a_scale);
            store<COLUMNS>(sums, b_scale);
        }
    }

    // Skips stages that contain nothing for this consumer.
    __device__ __forceinline__ void skip(int stages) {
        for (int i = 0; i < stages; ++i) {
            wait_full();
            __syncwarp();  // wait until all lanes have seen the stage full
            release();
            ring.next();
        }
    }

    __device__ __forceinline__ void multiply_tiles(const Operands& earlier, const Operands& now, const Sizes& sizes) {
        // kept in registers of the warp, because the compiler would compute them again for each block
        const u32 a = same(operand_at(memory + index * (A_BYTES / 2)));
        const u32 b = same(operand_at(memory + A_BYTES));
        while (true) {
            wait_full();
            const int4 note = load_16_bytes(memory + NOTES_AT + ring.stage * 16);
            const int row = same(note.x), column = same(note.y), blocks = same(note.z), counts = same(note.w);
            if (row < 0) break;
            const int earlier_blocks = counts / MOST_PARTS, expert = row / sizes.p, width = sizes.q - column;
            if (column < 0) {
                while (storing > 0) release_stored();
                skip(blocks + counts % MOST_PARTS);
            } else if (WIDTH > 128 && width <= 64) {
                tile<64>(a, b, blocks, earlier_blocks, expert, earlier, now);
            } else if (WIDTH > 128 && width <= 128) {
                tile<128>(a, b, blocks, earlier_blocks, expert, earlier, now);
            } else {
                tile<WIDTH>(a, b, blocks, earlier_blocks, expert, earlier, now);
            }
        }
        wait_stores_read();  // shared memory must exist until then
    }
};

// --- the kernel ------------------------------------------------------------------------------------------------------

// `out` and `added` are both the results.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    sums_kernel(const __grid_constant__ Operands earlier, const __grid_constant__ Operands now,
                const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap added,
                const __grid_constant__ Sizes sizes) {
    const u32 memory = shared_address(shared_memory);
    make_barriers<STAGES>(memory + FULL_AT, memory + EMPTY_AT, CLUSTER * CONSUMER_WARPS);
    const int warp = same(threadIdx.x / 32);
    if (threadIdx.x >= CONSUMER_WARPS * 32) {
        few_registers();
        if (warp == CONSUMER_WARPS) {
            Producer producer = {&added, memory, cluster_rank(), {0, 1}};  // the first round of stages is free
            producer.copy_tiles(&earlier, &now, sizes);
        }
    } else {
        many_registers();
        const int lane = threadIdx.x % 32;
        Consumer consumer = {&out, memory, lane, warp % 4, warp / 4, sizes.p, sizes.accumulate != 0, {0, 0}, 0, 0};
        consumer.multiply_tiles(earlier, now, sizes);
    }
    cluster_sync();  // wait until the peer's copies and arrivals are over
}
