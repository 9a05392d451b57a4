/* Tiles of a product with a packed matrix in float arithmetic (matmul.c), by vectors of whatever width there is.

   As in Goto and van de Geijn (2008); TILE_ROWS, STRIP and DEPTH are MR, NR and KC of BLIS. A strip of a panel's
   columns, as wide as a tile, is widened to float, DEPTH of k at a time, and stays in the first cache while all tiles
   of a block of rows pass. For few rows weights are widened in registers as they come from memory.

   Each sum adds its products in the order of k whichever way is taken: what comes of a row does not depend on the rows
   beside it. */
#ifndef MATMUL_FLOAT_H
#define MATMUL_FLOAT_H

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
    DEPTH = 256,     /* of k, as far as is widened at once */
    STEPS_AHEAD = 32 /* of k, by which weights are prefetched where they are widened in registers */
};

/* Number j of k of LANES columns; `odd`: whether j is. */
ALWAYS_INLINE lanes widened(int stored, const void *panel, ptrdiff_t j, int odd, ptrdiff_t column) {
    if (stored == STORED_F32)
        return load((const float *)panel + j * PANEL + column);
    if (stored == STORED_F16)
        return load_f16((const uint16_t *)panel + j * PANEL + column);
    words pairs = load_words((const uint32_t *)panel + (j - odd) / 2 * PANEL + column);
    return (lanes)(odd ? pairs & 0xffff0000u : pairs << 16);
}

/* A panel's strips one behind the other, each [count][STRIP], from number `first` of k on; `first` and `count` are
   even. */
ALWAYS_INLINE void widen_panel(int stored, const void *panel, ptrdiff_t first, ptrdiff_t count, float *strips) {
    for (ptrdiff_t j = 0; j < count; j += 2)
#pragma GCC unroll 8
        for (ptrdiff_t column = 0; column < PANEL; column += LANES) {
            float *to = strips + column / STRIP * STRIP * count + j * STRIP + column % STRIP;
            store(to, widened(stored, panel, first + j, 0, column));
            store(to + STRIP, widened(stored, panel, first + j + 1, 1, column));
        }
}

static void widen_strips(int stored, const void *panel, ptrdiff_t first, ptrdiff_t count, float *strips) {
    WITH_STORED(widen_panel, stored, panel, first, count, strips)
}

/* Adds to sums [rows][PANEL], or sets them, the products of `count` numbers of x [rows][k] with a strip. */
ALWAYS_INLINE void multiply_strip(int rows, int set, const float *x, ptrdiff_t k, ptrdiff_t count, const float *strip,
                                  float *sums) {
    lanes sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[i][v] = set ? all(0.0f) : load(sums + i * PANEL + v * LANES);
    for (ptrdiff_t j = 0; j < count; j++, strip += STRIP) {
        lanes weights[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            weights[v] = load(strip + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            lanes number = all(x[i * k + j]);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[i][v] += number * weights[v];
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            store(sums + i * PANEL + v * LANES, sum[i][v]);
}

/* To sums [rows][PANEL], from `column` on: x [rows][k] with `vectors` vectors of columns. */
ALWAYS_INLINE void multiply_columns(int rows, int vectors, int stored, const float *x, ptrdiff_t k, const void *panel,
                                    ptrdiff_t column, float *sums) {
    lanes sum[TILE_ROWS][PANEL / LANES];
    ptrdiff_t step = PANEL * stored_size(stored);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[i][v] = all(0.0f);
    for (ptrdiff_t j = 0; j < k; j += 2) {
#pragma GCC unroll 4
        for (ptrdiff_t line = 0; line < 2 * step; line += 64)
            __builtin_prefetch((const char *)panel + (j + STEPS_AHEAD) * step + line);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            lanes weights[PANEL / LANES];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                weights[v] = widened(stored, panel, j + odd, odd, column + v * LANES);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                lanes number = all(x[i * k + j + odd]);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    sum[i][v] += number * weights[v];
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(sums + i * PANEL + column + v * LANES, sum[i][v]);
}

/* All of a panel's columns, as many at once as there are registers for. */
ALWAYS_INLINE void multiply_few(int stored, int rows, const float *x, ptrdiff_t k, const void *panel, float *sums) {
    if (rows * (PANEL / LANES) <= TILE_ROWS * TILE_VECTORS)
        multiply_columns(rows, PANEL / LANES, stored, x, k, panel, 0, sums);
    else
        for (ptrdiff_t column = 0; column < PANEL; column += STRIP)
            multiply_columns(rows, TILE_VECTORS, stored, x, k, panel, column, sums);
}

/* Functions of their own, so that each has the registers for itself. */
#define FLOAT_TILES(rows)                                                                                              \
    NEVER_INLINE void strip_##rows(int set, const float *x, ptrdiff_t k, ptrdiff_t count, const float *strip,          \
                                   float *sums) {                                                                      \
        multiply_strip(rows, set, x, k, count, strip, sums);                                                           \
    }                                                                                                                  \
    NEVER_INLINE void few_##rows(int stored, const float *x, ptrdiff_t k, const void *panel, float *sums) {            \
        WITH_STORED(multiply_few, stored, rows, x, k, panel, sums)                                                     \
    }
FLOAT_TILES(1)
FLOAT_TILES(2)
FLOAT_TILES(3)
FLOAT_TILES(4)
FLOAT_TILES(5)
FLOAT_TILES(6)
#if LANES == 16
FLOAT_TILES(7)
FLOAT_TILES(8)
FLOAT_TILES(9)
FLOAT_TILES(10)
FLOAT_TILES(11)
FLOAT_TILES(12)
#define OF_EACH_HEIGHT(of)                                                                                             \
    { of##_1, of##_2, of##_3, of##_4, of##_5, of##_6, of##_7, of##_8, of##_9, of##_10, of##_11, of##_12 }
#else
#define OF_EACH_HEIGHT(of) { of##_1, of##_2, of##_3, of##_4, of##_5, of##_6 }
#endif

typedef void strip_multiplier(int set, const float *x, ptrdiff_t k, ptrdiff_t count, const float *strip, float *sums);
typedef void few_multiplier(int stored, const float *x, ptrdiff_t k, const void *panel, float *sums);
static strip_multiplier *const multiply_strips[TILE_ROWS] = OF_EACH_HEIGHT(strip);
static few_multiplier *const multiply_few_rows[TILE_ROWS] = OF_EACH_HEIGHT(few);

/* bias [32], or NULL. To y, whose rows are `width` apart, the first `filled` columns; a gated panel has 16. */
ALWAYS_INLINE void finish_activated(int activation, int gated, const float *bias, ptrdiff_t rows, const float *sums,
                                    float *y, ptrdiff_t width, ptrdiff_t filled) {
    for (ptrdiff_t i = 0; i < rows; i++, sums += PANEL, y += width)
        for (ptrdiff_t c = 0; c < filled; c += LANES) {
            lanes x = activated(activation, load(sums + c) + (bias ? load(bias + c) : all(0.0f)));
            if (gated)
                x *= load(sums + HALF + c) + (bias ? load(bias + HALF + c) : all(0.0f));
            if (c + LANES <= filled)
                store(y + c, x);
            else
                memcpy(y + c, &x, (size_t)(filled - c) * sizeof(float));
        }
}

static void finish_floats(int activation, int gated, const float *bias, ptrdiff_t rows, const float *sums, float *y,
                          ptrdiff_t width, ptrdiff_t filled) {
    WITH_ACTIVATION(finish_activated, activation, gated, bias, rows, sums, y, width, filled)
}

#endif
