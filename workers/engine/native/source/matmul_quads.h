/* Products with weights of 8 or 4 bits where the processor adds four products at once (AVX512-VNNI, AVX-VNNI, NEON's dot
   products) or, of two rows and two columns, eight (NEON's products of matrices, I8MM). Rows of x become int8, each
   BLOCK of their numbers by a scale of its own. What the zero points of weights add, and QUAD_OFFSET with 8 bits, is
   taken off each block's sum, which is exact.

   Blocks and their order do not depend on the number of rows: what comes of a row does not depend on the rows beside
   it. */
#ifndef MATMUL_QUADS_H
#define MATMUL_QUADS_H

#include "matmul_gather.h"
#include "matmul_words.h"

enum {
    BLOCK = 128, /* numbers along k that have a scale */
    QUAD_VECTORS = PANEL / LANES,
    MAX_INT8 = 127
};

/* Numbers from `first` on that have one scale: up to BLOCK of a group. */
ALWAYS_INLINE ptrdiff_t block_numbers(ptrdiff_t group, ptrdiff_t first, ptrdiff_t end) {
    ptrdiff_t of_group = group - first % group, left = end - first < BLOCK ? end - first : BLOCK;
    return of_group < left ? of_group : left;
}

static ptrdiff_t integer_row_bytes(const struct packed_matrix *matrix) {
    return padded(matrix->k, matrix->stored);
}

/* Blocks of a row. */
static ptrdiff_t count_scales(const struct packed_matrix *matrix) {
    ptrdiff_t group = padded(matrix->group, matrix->stored), end = padded(matrix->k, matrix->stored);
    ptrdiff_t of_group = (group + BLOCK - 1) / BLOCK, rest = end % group;
    return end / group * of_group + (rest + BLOCK - 1) / BLOCK;
}

static ptrdiff_t count_sums(const struct packed_matrix *matrix, int few) {
    (void)few;
    return count_scales(matrix);
}

/* The order in which `unpacked_quads` gives eight weights of 4 bits. */
static const int order_of_eight[8] = {0, 4, 1, 5, 2, 6, 3, 7};

#if LANES == 16

/* 16 numbers of x, zeros behind the first `count`. */
ALWAYS_INLINE lanes load_numbers(const char *x, int is_bf16, ptrdiff_t count) {
    __mmask16 there = count >= LANES ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
    if (!is_bf16)
        return (lanes)_mm512_maskz_loadu_ps(there, x);
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x)), 16);
}

/* A block of x, of which `count` numbers are there, as `filled` numbers of int8, in the order in which `unpacked_quads`
   gives weights of 4 bits if `by_eight`. Returns their scale, NaN where one is not finite; *total: their sum. */
ALWAYS_INLINE float quantize_block(const char *x, int is_bf16, ptrdiff_t count, ptrdiff_t filled, int by_eight,
                                   int8_t *to, int32_t *total) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15); /* `order_of_eight` */
    lanes numbers[BLOCK / LANES];
    __m512i most = _mm512_setzero_si512(); /* of magnitudes, whose bits are ordered as they are, and NaN last */
    integers sum = {0};
#pragma GCC unroll 8
    for (ptrdiff_t i = 0; i < BLOCK / LANES; i++) {
        numbers[i] = load_numbers(x + i * LANES * (is_bf16 ? 2 : 4), is_bf16, count - i * LANES);
        most = _mm512_max_epu32(most, (__m512i)((words)numbers[i] & 0x7fffffffu));
    }
    float magnitude = float_of_bits(_mm512_reduce_max_epu32(most)),
          inverse = magnitude > 1e-30f ? MAX_INT8 / magnitude : 0.0f;
    int finite = magnitude * 0.0f == 0.0f;
#pragma GCC unroll 8
    for (ptrdiff_t i = 0; i < BLOCK / LANES; i++) {
        ptrdiff_t left = filled - i * LANES;
        __m512i rounded = _mm512_cvtps_epi32((__m512)(finite ? numbers[i] * inverse : all(0.0f)));
        __m128i narrowed = _mm512_cvtepi32_epi8(rounded);
        sum += (integers)rounded;
        if (left > 0)
            _mm_mask_storeu_epi8(to + i * LANES, left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1),
                                 by_eight ? _mm_shuffle_epi8(narrowed, order) : narrowed);
    }
    *total = _mm512_reduce_add_epi32((__m512i)sum);
    return finite ? magnitude / MAX_INT8 : NAN;
}

#else

/* The same by vectors of any width. With AVX-512 whole products take 5 to 7 % longer by it (EPYC, Zen 5). */
ALWAYS_INLINE float quantize_block(const char *x, int is_bf16, ptrdiff_t count, ptrdiff_t filled, int by_eight,
                                   int8_t *to, int32_t *total) {
    float numbers[BLOCK] __attribute__((aligned(64)));
    int32_t rounded[BLOCK];
    integers most = {0}; /* of magnitudes, whose bits are ordered as they are, and NaN last */
    widen(numbers, x, count, is_bf16);
    memset(numbers + count, 0, (size_t)(BLOCK - count) * sizeof *numbers);
    for (ptrdiff_t i = 0; i < BLOCK; i += LANES) {
        integers bits = (integers)(load_words(numbers + i) & 0x7fffffffu), above = bits > most;
        most = (bits & above) | (most & ~above);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++)
        bits = most[i] > bits ? most[i] : bits;
    float magnitude = float_of_bits((uint32_t)bits), inverse = magnitude > 1e-30f ? MAX_INT8 / magnitude : 0.0f;
    int finite = magnitude * 0.0f == 0.0f;
    *total = 0;
    for (ptrdiff_t i = 0; i < BLOCK; i++) {
        rounded[i] = finite ? (int32_t)rintf(numbers[i] * inverse) : 0;
        *total += rounded[i];
    }
    for (ptrdiff_t i = 0; i < filled; i++)
        to[i] = (int8_t)rounded[by_eight ? i / 8 * 8 + order_of_eight[i % 8] : i];
    return finite ? magnitude / MAX_INT8 : NAN;
}

#endif

/* x [k] as int8 [padded k], with a scale and a sum for each block. */
static void quantize_integers(const struct packed_matrix *matrix, const char *x, char *to, float *scales,
                              int32_t *totals) {
    ptrdiff_t k = matrix->k, end = padded(k, matrix->stored), group = padded(matrix->group, matrix->stored);
    int by_eight = matrix->stored == STORED_INT4;
    for (ptrdiff_t first = 0, count; first < end; first += count, to += count, scales++, totals++) {
        count = block_numbers(group, first, end);
        ptrdiff_t there = k - first < count ? k - first : count;
        *scales = matrix->floats ? quantize_block(x + first * 4, 0, there, count, by_eight, (int8_t *)to, totals)
                                 : quantize_block(x + first * 2, 1, there, count, by_eight, (int8_t *)to, totals);
    }
}

/* Rows of x as `quantize_integers` makes them, [end], or gathered in quads; each with [blocks] scales and sums. */
typedef struct {
    const char *numbers;
    const float *scales;
    const int32_t *totals;
    ptrdiff_t end, blocks;
} quad_rows;

/* Quads of numbers of 4 bits: the first of words that hold two of them, or the second. */
ALWAYS_INLINE words unpacked_quads(words packed, int part) {
    return (part ? packed >> 4 : packed) & 0x0f0f0f0fu;
}

/* sum plus four products of weights and numbers of x. */
ALWAYS_INLINE integers add_quads(integers sum, words weights, words numbers) {
#if LANES == 16
    return (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)numbers);
#elif LANES == 8
    return (integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)numbers);
#else
    return (integers)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)numbers);
#endif
}

/* What is added to a sum for the zero points of its weights; `zeros`: pairs of them, of int4. */
ALWAYS_INLINE integers less_zeros(int stored, int32_t total, words zeros) {
    if (stored == STORED_INT8)
        return (integers){0} - QUAD_OFFSET * total;
    return add_products((integers){0}, zeros & 0xffffu, (words){0} + ((uint32_t)-total & 0xffffu));
}

/* Adds to a sum, or sets it, what a block's whole numbers are by the scales of x and of the weights. */
ALWAYS_INLINE void add_block(float *sum, int set, integers whole, float scale, lanes scales) {
    lanes scaled = __builtin_convertvector(whole, lanes) * scale;
    store(sum, fused(set ? all(0.0f) : load(sum), scaled, scales));
}

/* To sums [rows][PANEL] the products of rows of x with a panel, whose groups are in words. */
ALWAYS_INLINE void multiply_quads(int stored, int gathered, int rows, quad_rows x, const packed_panel *panel,
                                  prefetching next, float *sums) {
    ptrdiff_t group = 2 * panel->group, at_once = stored == STORED_INT4 ? 8 : 4;
    const char *from = panel->weights;
    for (ptrdiff_t first = 0, block = 0, count; first < x.end; first += count, block++) {
        ptrdiff_t line = first / group * PANEL;
        integers whole[MOST_ROWS][QUAD_VECTORS];
        for (int i = 0; i < next.lines; i++, next.at += 64)
            __builtin_prefetch(next.at, 0, 2);
#pragma GCC unroll 8
        for (int v = 0; v < QUAD_VECTORS; v++) {
            words zeros = stored == STORED_INT4 ? load_octets(panel->zeros + line + v * LANES) : (words){0};
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++)
                whole[i][v] = less_zeros(stored, x.totals[i * x.blocks + block], zeros);
        }
        count = block_numbers(group, first, x.end);
        for (ptrdiff_t j = first; j < first + count; j += at_once, from += PANEL * 4) {
            words packed[QUAD_VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < QUAD_VECTORS; v++)
                packed[v] = load_words(from + 4 * LANES * v);
#pragma GCC unroll 2
            for (int part = 0; part < at_once / 4; part++) {
                words weights[QUAD_VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < QUAD_VECTORS; v++)
                    weights[v] = stored == STORED_INT4 ? unpacked_quads(packed[v], part) : packed[v];
#pragma GCC unroll 12
                for (int i = 0; i < rows; i++) {
                    const char *at = gathered ? x.numbers + (j + 4 * part) * rows + 4 * i
                                              : x.numbers + i * x.end + j + 4 * part;
                    words numbers = repeated((const void *)at);
#pragma GCC unroll 8
                    for (int v = 0; v < QUAD_VECTORS; v++)
                        whole[i][v] = add_quads(whole[i][v], weights[v], numbers);
                }
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < QUAD_VECTORS; v++) {
            lanes scales = load(panel->scales + line + v * LANES);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++)
                add_block(sums + i * PANEL + v * LANES, first == 0, whole[i][v], x.scales[i * x.blocks + block],
                          scales);
        }
    }
}

#if MULTIPLIES_MATRICES

enum { HALF_VECTORS = HALF / LANES };

/* Products of two rows with two columns: of pairs of rows, vectors of four columns, and their halves. */
typedef int32x4_t squares[(MOST_ROWS + 1) / 2][HALF_VECTORS][2];

/* Adds the products of eight numbers along k, or of four, which `count` says. */
ALWAYS_INLINE void add_matrices(int stored, int rows, int count, const char *x, ptrdiff_t stride, const char *weights,
                                squares sums) {
    int8x16_t pairs[(MOST_ROWS + 1) / 2];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i += 2) {
        uint64_t numbers[2] = {0};
        memcpy(numbers, x + i * stride, (size_t)count);
        memcpy(numbers + 1, x + (i + 1 < rows ? i + 1 : i) * stride, (size_t)count);
        pairs[i / 2] = (int8x16_t)vcombine_u64(vcreate_u64(numbers[0]), vcreate_u64(numbers[1]));
    }
#pragma GCC unroll 4
    for (int v = 0; v < HALF_VECTORS; v++) {
        words first = load_words(weights + 4 * LANES * v), second = {0};
        if (stored == STORED_INT4)
            second = unpacked_quads(first, 1), first = unpacked_quads(first, 0);
        else if (count == 8)
            second = load_words(weights + 4 * (PANEL + LANES * v));
        int8x16_t low = (int8x16_t)vzip1q_s32((int32x4_t)first, (int32x4_t)second),
                  high = (int8x16_t)vzip2q_s32((int32x4_t)first, (int32x4_t)second);
#pragma GCC unroll 3
        for (int i = 0; i < (rows + 1) / 2; i++) {
            sums[i][v][0] = vmmlaq_s32(sums[i][v][0], pairs[i], low);
            sums[i][v][1] = vmmlaq_s32(sums[i][v][1], pairs[i], high);
        }
        __asm__ volatile("" ::: "memory"); /* what is read early takes registers from sums */
    }
}

/* As `multiply_quads`, of half of a panel's columns. `x` is not gathered. */
ALWAYS_INLINE void multiply_matrices(int stored, int rows, quad_rows x, const packed_panel *panel, ptrdiff_t column,
                                     prefetching next, float *sums) {
    ptrdiff_t group = 2 * panel->group, line_bytes = PANEL * stored_bits(stored);
    const char *from = panel->weights + 4 * column;
    for (ptrdiff_t first = 0, block = 0, count; first < x.end; first += count, block++) {
        ptrdiff_t line = first / group * PANEL + column, j = first;
        squares whole = {0};
        for (int i = 0; i < next.lines; i++, next.at += 64)
            __builtin_prefetch(next.at, 0, 2);
        count = block_numbers(group, first, x.end);
        for (; j + 8 <= first + count; j += 8, from += line_bytes)
            add_matrices(stored, rows, 8, x.numbers + j, x.end, from, whole);
        if (j < first + count)
            add_matrices(stored, rows, 4, x.numbers + j, x.end, from, whole), from += line_bytes / 2;
#pragma GCC unroll 4
        for (int v = 0; v < HALF_VECTORS; v++) {
            lanes scales = load(panel->scales + line + v * LANES);
            words zeros = stored == STORED_INT4 ? load_octets(panel->zeros + line + v * LANES) : (words){0};
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                int64x2_t left = (int64x2_t)whole[i / 2][v][0], right = (int64x2_t)whole[i / 2][v][1];
                integers sum = (integers)(i % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
                add_block(sums + i * PANEL + column + v * LANES, first == 0,
                          sum + less_zeros(stored, x.totals[i * x.blocks + block], zeros),
                          x.scales[i * x.blocks + block], scales);
            }
        }
    }
}

#else

ALWAYS_INLINE void multiply_matrices(int stored, int rows, quad_rows x, const packed_panel *panel, ptrdiff_t column,
                                     prefetching next, float *sums) {
    (void)stored, (void)rows, (void)x, (void)panel, (void)column, (void)next, (void)sums;
}

#endif

/* One row is multiplied by quads: as many instructions, and none that order the weights. */
ALWAYS_INLINE void multiply_tile(int stored, int gathered, int rows, quad_rows x, const packed_panel *panel,
                                 prefetching next, float *sums) {
    if (!MULTIPLIES_MATRICES || rows == 1) {
        multiply_quads(stored, gathered, rows, x, panel, next, sums);
        return;
    }
    multiply_matrices(stored, rows, x, panel, 0, next, sums);
    multiply_matrices(stored, rows, x, panel, HALF, (prefetching){NULL, 0}, sums);
}

#define QUAD_TILE(rows)                                                                                                \
    NEVER_INLINE void quads_##rows(int stored, int gathered, quad_rows x, const packed_panel *panel, prefetching next,  \
                                   float *sums) {                                                                      \
        if (stored == STORED_INT8 && gathered)                                                                         \
            multiply_tile(STORED_INT8, 1, rows, x, panel, next, sums);                                                 \
        else if (stored == STORED_INT8)                                                                                \
            multiply_tile(STORED_INT8, 0, rows, x, panel, next, sums);                                                 \
        else if (gathered)                                                                                             \
            multiply_tile(STORED_INT4, 1, rows, x, panel, next, sums);                                                 \
        else                                                                                                           \
            multiply_tile(STORED_INT4, 0, rows, x, panel, next, sums);                                                 \
    }
QUAD_TILE(1)
QUAD_TILE(2)
QUAD_TILE(3)
#if LANES == 16 || MULTIPLIES_MATRICES
QUAD_TILE(4)
QUAD_TILE(5)
QUAD_TILE(6)
#endif
#if LANES == 16
QUAD_TILE(7)
QUAD_TILE(8)
QUAD_TILE(9)
QUAD_TILE(10)
QUAD_TILE(11)
QUAD_TILE(12)

#define QUAD_TILES \
    { quads_1, quads_2, quads_3, quads_4, quads_5, quads_6, quads_7, quads_8, quads_9, quads_10, quads_11, quads_12 }
#elif MULTIPLIES_MATRICES
#define QUAD_TILES { quads_1, quads_2, quads_3, quads_4, quads_5, quads_6 }
#else
#define QUAD_TILES { quads_1, quads_2, quads_3 }
#endif

static void (*const multiply_quad_rows[MOST_ROWS])(int, int, quad_rows, const packed_panel *, prefetching, float *) =
    QUAD_TILES;

#endif
