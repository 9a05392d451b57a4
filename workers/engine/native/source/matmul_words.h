/* Tiles of a product with a packed matrix (matmul.c) by vectors of whatever width there is, whose lanes are words: floats
   or, with weights of 8 or 4 bits, pairs of int16, of which both products are added at once.

   As in Goto and van de Geijn (2008); TILE_ROWS, STRIP and DEPTH are MR, NR and KC of BLIS. A strip of a panel's
   columns, as wide as a tile, is widened to words, DEPTH of k at a time, and stays in the first cache while all tiles
   of a block of rows pass. For few rows weights are widened in registers as they come from memory.

   Each sum adds its products in the order of k whichever way is taken: what comes of a row does not depend on the rows
   beside it. Sums of integers are exact for DEPTH words, or for a group, and then scaled and added to those in
   float. */
#ifndef MATMUL_WORDS_H
#define MATMUL_WORDS_H

#include "activation.h"
#include "matmul.h"

/* A tile takes TILE_ROWS * TILE_VECTORS registers for sums, TILE_VECTORS for weights and one for x: 15 of 16 with AVX2,
   27 of 32 with AVX-512, 29 of 32 with NEON. */
enum {
#if LANES == 16
    TILE_ROWS = 12,
    TILE_VECTORS = 2,
#elif defined(__aarch64__)
    TILE_ROWS = 6,
    TILE_VECTORS = 4,
#else
    TILE_ROWS = 6,
    TILE_VECTORS = 2,
#endif
    STRIP = TILE_VECTORS * LANES,
    DEPTH = LANES == 16 ? 128 : 256, /* words of a row, as far as is widened at once: a strip of 16 KiB at most */
    STEPS_AHEAD = 32,                /* words by which weights are prefetched where they are widened in registers */
    ROWS_WITH_TOTALS = 2             /* of a tile, up to which zero points are multiplied with totals of x */
};

/* A panel of weights, or what is left of it from some group on. */
typedef struct {
    const char *weights;
    const float *scales;  /* of integers [groups][PANEL] */
    const uint8_t *zeros; /* of int4, likewise */
    ptrdiff_t group;      /* words of a row that share a scale */
} packed_panel;

/* Words that so many numbers of a row make. */
static inline ptrdiff_t words_of(int stored, ptrdiff_t numbers) {
    return is_integer(stored) ? padded(numbers, stored) / 2 : numbers;
}

/* Words of a row of x, and of a panel's columns; a multiple of `words_at_once`. */
static inline ptrdiff_t row_words(const struct packed_matrix *matrix) {
    return words_of(matrix->stored, matrix->k);
}

/* Words of a column that are stored together, or twice as many. */
ALWAYS_INLINE int words_at_once(int stored) {
    return stored == STORED_INT4 ? 4 : 2;
}

/* Bytes of what PANEL words are stored as. */
static inline ptrdiff_t step_bytes(int stored) {
    return PANEL * stored_bits(stored) / 8 * (is_integer(stored) ? 2 : 1);
}

/* The scales and zero points of the group that a word is in, and the weights from that word on. */
ALWAYS_INLINE packed_panel panel_from(int stored, const packed_panel *panel, ptrdiff_t first) {
    if (!is_integer(stored))
        return (packed_panel){panel->weights + first * step_bytes(stored), NULL, NULL, panel->group};
    ptrdiff_t before = first / panel->group * PANEL;
    return (packed_panel){panel->weights + first * step_bytes(stored), panel->scales + before,
                          stored == STORED_INT4 ? panel->zeros + before : NULL, panel->group};
}

/* Words from `first` on that are multiplied before sums become floats: up to DEPTH, all of one group. */
ALWAYS_INLINE ptrdiff_t count_words(ptrdiff_t group, ptrdiff_t first, ptrdiff_t end) {
    ptrdiff_t of_group = group - first % group, left = end - first < DEPTH ? end - first : DEPTH;
    return of_group < left ? of_group : left;
}

/* How often that is until `end`. */
ALWAYS_INLINE ptrdiff_t count_blocks(ptrdiff_t group, ptrdiff_t end) {
    ptrdiff_t whole = end / group, of_group = (group + DEPTH - 1) / DEPTH, rest = end % group;
    return whole * of_group + (rest + DEPTH - 1) / DEPTH;
}

/* Word j of LANES columns; `part`: the rest of j by `words_at_once`. Less `zeros` unless these are taken off later. */
ALWAYS_INLINE words widened(int stored, const void *panel, ptrdiff_t j, int part, ptrdiff_t column, int later,
                            words zeros) {
    if (stored == STORED_INT4) {
        words numbers = unpacked_pairs(load_words((const uint32_t *)panel + (j - part) / 4 * PANEL + column), part);
        return later ? numbers : pair_difference(numbers, zeros);
    }
    if (stored == STORED_INT8)
        return load_pairs((const int8_t *)panel + (j * PANEL + column) * 2);
    if (stored == STORED_F32)
        return load_words((const float *)panel + j * PANEL + column);
    if (stored == STORED_F16)
        return (words)load_f16((const uint16_t *)panel + j * PANEL + column);
    words pairs = load_words((const uint32_t *)panel + (j - part) / 2 * PANEL + column);
    return part ? pairs & 0xffff0000u : pairs << 16;
}

/* Pairs of the zero points of LANES columns. */
ALWAYS_INLINE words zero_pairs(int stored, const packed_panel *panel, ptrdiff_t column) {
    return stored == STORED_INT4 ? load_octets(panel->zeros + column) * 0x10001u : (words){0};
}

/* The first `count` words as strips one behind the other, each [count][STRIP]. */
ALWAYS_INLINE void widen_panel(int stored, const packed_panel *panel, ptrdiff_t count, uint32_t *strips) {
#pragma GCC unroll 8
    for (ptrdiff_t column = 0; column < PANEL; column += LANES) {
        words zeros = zero_pairs(stored, panel, column);
        uint32_t *to = strips + column / STRIP * STRIP * count + column % STRIP;
        for (ptrdiff_t j = 0; j < count; j += words_at_once(stored), to += words_at_once(stored) * STRIP)
#pragma GCC unroll 4
            for (int part = 0; part < words_at_once(stored); part++)
                store_words(to + part * STRIP, widened(stored, panel->weights, j + part, part, column, 0, zeros));
    }
}

static void widen_strips(int stored, const packed_panel *panel, ptrdiff_t count, uint32_t *strips) {
    WITH_STORED(widen_panel, stored, panel, count, strips)
}

/* Sums of LANES columns: one of the two, so that compilers keep it in a register without conversions. */
typedef struct {
    lanes floats;
    integers whole;
} accumulator;

/* `set`: nothing was added up yet. */
ALWAYS_INLINE accumulator begun_sum(int integer, int set, const float *sums) {
    return (accumulator){set || integer ? all(0.0f) : load(sums), (integers){0}};
}

ALWAYS_INLINE void add_word(int integer, accumulator *sum, words x, words weights) {
    if (integer)
        sum->whole = add_products(sum->whole, x, weights);
    else
        sum->floats += (lanes)x * (lanes)weights;
}

/* `scales`: those of the panel, whose `column` is the sum's first; of integers only. */
ALWAYS_INLINE void store_sum(int integer, int set, accumulator sum, const float *scales, ptrdiff_t column,
                             float *sums) {
    if (!integer)
        store(sums, sum.floats);
    else
        store(sums,
              fused(set ? all(0.0f) : load(sums), __builtin_convertvector(sum.whole, lanes), load(scales + column)));
}

/* Adds to sums [rows][PANEL], or sets them, the products of `count` words of x, whose rows are `stride` apart, with a
   strip; `scales` of its columns. */
ALWAYS_INLINE void multiply_strip(int integer, int rows, int set, const uint32_t *x, ptrdiff_t stride, ptrdiff_t count,
                                  const uint32_t *strip, const float *scales, float *sums) {
    accumulator sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[i][v] = begun_sum(integer, set, sums + i * PANEL + v * LANES);
    for (ptrdiff_t j = 0; j < count; j++, strip += STRIP) {
        words weights[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            weights[v] = load_words(strip + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            words number = repeated(x + i * stride + j);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                add_word(integer, &sum[i][v], number, weights[v]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            store_sum(integer, set, sum[i][v], scales, v * LANES, sums + i * PANEL + v * LANES);
}

/* The same with `vectors` vectors of a panel's columns, from `column` on. Zero points times the sum of the same
   numbers of x, whose rows are `blocks` apart, are taken off at the end, where rows are so few that this is less work. */
ALWAYS_INLINE void multiply_columns(int rows, int vectors, int stored, int set, const uint32_t *x, ptrdiff_t stride,
                                    ptrdiff_t count, packed_panel panel, ptrdiff_t column, const int32_t *totals,
                                    ptrdiff_t blocks, float *sums) {
    accumulator sum[TILE_ROWS][PANEL / LANES];
    words zeros[PANEL / LANES];
    int integer = is_integer(stored), at_once = words_at_once(stored), at_end = rows <= ROWS_WITH_TOTALS;
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
        zeros[v] = zero_pairs(stored, &panel, column + v * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[i][v] = begun_sum(integer, set, sums + i * PANEL + column + v * LANES);
    for (ptrdiff_t j = 0; j < count; j += at_once) {
#pragma GCC unroll 4
        for (ptrdiff_t line = 0; line < at_once * step_bytes(stored); line += 64)
            __builtin_prefetch(panel.weights + (j + STEPS_AHEAD) * step_bytes(stored) + line);
#pragma GCC unroll 4
        for (int part = 0; part < at_once; part++) {
            words weights[PANEL / LANES];
            if (LANES == 8)
                __asm__ volatile("" ::: "memory"); /* what is read early takes registers from sums */
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                weights[v] = widened(stored, panel.weights, j + part, part, column + v * LANES, at_end, zeros[v]);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                words number = repeated(x + i * stride + j + part);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    add_word(integer, &sum[i][v], number, weights[v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            if (stored == STORED_INT4 && at_end)
                sum[i][v].whole -= (integers)load_octets(panel.zeros + column + v * LANES) * totals[i * blocks];
            store_sum(integer, set, sum[i][v], panel.scales, column + v * LANES,
                      sums + i * PANEL + column + v * LANES);
        }
}

/* All of a panel's columns, as many at once as there are registers for: to sums [rows][PANEL], of x [rows][count]. */
ALWAYS_INLINE void multiply_few(int stored, int rows, const uint32_t *x, ptrdiff_t count, const packed_panel *panel,
                                const int32_t *totals, float *sums) {
    ptrdiff_t blocks = stored == STORED_INT4 ? count_blocks(panel->group, count) : 0;
    int vectors = rows * (PANEL / LANES) < TILE_ROWS * TILE_VECTORS ? PANEL / LANES : TILE_VECTORS;
    for (ptrdiff_t column = 0; column < PANEL; column += vectors * LANES)
        for (ptrdiff_t first = 0, block = 0, added; first < count; first += added, block++) {
            added = is_integer(stored) ? count_words(panel->group, first, count) : count;
            multiply_columns(rows, vectors, stored, first == 0, x + first, count, added,
                             panel_from(stored, panel, first), column,
                             stored == STORED_INT4 ? totals + block : NULL, blocks, sums);
        }
}

/* Functions of their own, so that each has the registers for itself. */
#define WORD_TILES(rows)                                                                                               \
    NEVER_INLINE void strip_##rows(int integer, int set, const uint32_t *x, ptrdiff_t stride, ptrdiff_t count,         \
                                   const uint32_t *strip, const float *scales, float *sums) {                          \
        if (integer)                                                                                                   \
            multiply_strip(1, rows, set, x, stride, count, strip, scales, sums);                                       \
        else                                                                                                           \
            multiply_strip(0, rows, set, x, stride, count, strip, scales, sums);                                       \
    }                                                                                                                  \
    NEVER_INLINE void few_##rows(int stored, const uint32_t *x, ptrdiff_t count, const packed_panel *panel,            \
                                 const int32_t *totals, float *sums) {                                                 \
        WITH_STORED(multiply_few, stored, rows, x, count, panel, totals, sums)                                         \
    }
WORD_TILES(1)
WORD_TILES(2)
WORD_TILES(3)
WORD_TILES(4)
WORD_TILES(5)
WORD_TILES(6)
#if LANES == 16
WORD_TILES(7)
WORD_TILES(8)
WORD_TILES(9)
WORD_TILES(10)
WORD_TILES(11)
WORD_TILES(12)
#define OF_EACH_HEIGHT(of)                                                                                             \
    { of##_1, of##_2, of##_3, of##_4, of##_5, of##_6, of##_7, of##_8, of##_9, of##_10, of##_11, of##_12 }
#else
#define OF_EACH_HEIGHT(of) { of##_1, of##_2, of##_3, of##_4, of##_5, of##_6 }
#endif

typedef void strip_multiplier(int integer, int set, const uint32_t *x, ptrdiff_t stride, ptrdiff_t count,
                              const uint32_t *strip, const float *scales, float *sums);
typedef void few_multiplier(int stored, const uint32_t *x, ptrdiff_t count, const packed_panel *panel,
                            const int32_t *totals, float *sums);
static strip_multiplier *const multiply_strips[TILE_ROWS] = OF_EACH_HEIGHT(strip);
static few_multiplier *const multiply_few_rows[TILE_ROWS] = OF_EACH_HEIGHT(few);

/* bias [32], or NULL. To y, whose rows are `width` apart, the first `filled` columns; a gated panel has 16. */
ALWAYS_INLINE void finish_activated(int activation, int gated, int to_bf16, const float *bias, ptrdiff_t rows,
                                    const float *sums, char *y, ptrdiff_t width, ptrdiff_t filled) {
    size_t size = to_bf16 ? sizeof(bf16) : sizeof(float);
    for (ptrdiff_t i = 0; i < rows; i++, sums += PANEL, y += (size_t)width * size)
        for (ptrdiff_t c = 0; c < filled; c += LANES) {
            lanes x = activated(activation, load(sums + c) + (bias ? load(bias + c) : all(0.0f)));
            if (gated)
                x *= load(sums + HALF + c) + (bias ? load(bias + HALF + c) : all(0.0f));
            ptrdiff_t count = filled - c < LANES ? filled - c : LANES;
            if (to_bf16)
                narrow(y + (size_t)c * size, (const float *)&x, count, 1);
            else if (count == LANES)
                store((float *)y + c, x);
            else
                memcpy(y + (size_t)c * size, &x, (size_t)count * size);
        }
}

static void finish_sums(int activation, int gated, int to_bf16, const float *bias, ptrdiff_t rows, const float *sums,
                        void *y, ptrdiff_t width, ptrdiff_t filled) {
    WITH_ACTIVATION(finish_activated, activation, gated, to_bf16, bias, rows, sums, y, width, filled)
}

#endif
