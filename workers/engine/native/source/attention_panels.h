/* Panels as they are multiplied with, and the softmax of Milakov and Gimelshein (2018) over their scores. */
#ifndef ATTENTION_PANELS_H
#define ATTENTION_PANELS_H

#include "attention.h"

/* By how many words few queries prefetch what they read, 0 for not at all (measured: docs/performance.md). */
#if LANES == 16 && !defined(__AVX512BF16__)
enum { WORDS_AHEAD = 1024 };
#else
enum { WORDS_AHEAD = 0 };
#endif

/* A panel of rows that lie one behind the other in blocks; what does not exist, and what is before token `oldest`, is
   0: blocks before a window may be another's by now. */
static void make_panel(const attention_step *step, const uint32_t *cache, const int32_t *table, ptrdiff_t head,
                       ptrdiff_t oldest, ptrdiff_t first, ptrdiff_t count, uint32_t *panel, int mode) {
    ptrdiff_t size = step->head_dim, numbers = word_numbers(mode), width = 4 / numbers, steps = key_words(size, mode),
              across = value_words(size);
    memset(panel, 0, (size_t)panel_words(size, mode) * 4);
    for (ptrdiff_t lane = at_least(oldest - first, 0); lane < count; lane++) {
        ptrdiff_t block = table[(first + lane) / step->block_size], offset = (first + lane) % step->block_size;
        const char *key = (const char *)(cache + block * step->block_stride)
            + (head * 2 * step->block_size + offset) * size * width;
        const char *value = key + step->block_size * size * width;
        char *keys = (char *)(panel + lane),
            *values = (char *)(panel + steps * PANEL + lane / numbers * across) + lane % numbers * width;
        for (ptrdiff_t i = 0; i < size; i++) {
            memcpy(keys + i / numbers * PANEL * 4 + i % numbers * width, key + i * width, (size_t)width);
            memcpy(values + i * 4, value + i * width, (size_t)width);
        }
    }
}

/* The panel of one of the tile's heads that begins with token `first`: in the cache, or made at `space`, of `count`
   tokens. */
ALWAYS_INLINE const uint32_t *find_panel(const attention_layer *layer, const tile *t, ptrdiff_t head, ptrdiff_t first,
                                         ptrdiff_t count, uint32_t *space, int mode) {
    const attention_step *step = layer->step;
    const int32_t *table = step->tables + (ptrdiff_t)t->row * step->max_blocks;
    if (in_panels(step->head_dim, step->block_size))
        return panel_at(step, layer->cache, table[first / step->block_size], head, first % step->block_size, mode);
    make_panel(step, layer->cache, table, head, t->begin, first, at_most(PANEL, count), space, mode);
    return space;
}

/* Prefetches `vectors` vectors that begin so many words behind `from`; nothing where that is 0. */
ALWAYS_INLINE void prefetch_ahead(const uint32_t *from, int ahead, int vectors) {
    if (ahead)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            __builtin_prefetch(from + ahead + v * LANES);
}

/* Adds a word of values of each number, weighted, to the sums of `rows` queries. `mask`: which bits of the values are
   the row's. */
ALWAYS_INLINE void add_words(int rows, int columns, const uint32_t *weights, ptrdiff_t width, const uint32_t *values,
                             uint32_t mask, int ahead, lanes sums[ROWS][COLUMNS], int mode) {
    words value[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++)
        value[j] = load_words(values + j * LANES) & mask;
    prefetch_ahead(values, ahead, columns);
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
        factor weight = repeated_factor(weights + i * width, mode);
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            sums[i][j] = multiply_add(sums[i][j], weight, value[j], mode);
    }
}

/* Adds the first `count` of a panel's values. */
ALWAYS_INLINE void add_panel(int rows, int columns, const uint32_t *weights, ptrdiff_t width, const uint32_t *values,
                             ptrdiff_t count, ptrdiff_t size, int ahead, lanes sums[ROWS][COLUMNS], int mode) {
    const uint32_t *end = values + count / word_numbers(mode) * size;
    for (; values < end; values += size, weights += factor_words(mode))
        add_words(rows, columns, weights, width, values, 0xffffffffu, ahead, sums, mode);
    if (mode != FLOATS && count % 2) /* the last pair's other half is not the row's */
        add_words(rows, columns, weights, width, values, 0xffffu, ahead, sums, mode);
}

ALWAYS_INLINE void load_sums(int rows, int columns, const float *from, ptrdiff_t size, lanes sums[ROWS][COLUMNS]) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            sums[i][j] = load(from + i * size + j * LANES);
}

ALWAYS_INLINE void store_sums(int rows, int columns, float *to, ptrdiff_t size, lanes sums[ROWS][COLUMNS]) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++)
            store(to + i * size + j * LANES, sums[i][j]);
}

ALWAYS_INLINE integers between(ptrdiff_t at, ptrdiff_t from, ptrdiff_t to) {
    integers number = {0};
    for (int i = 0; i < LANES; i++)
        number[i] = (int32_t)at + i;
    return (number >= (int32_t)from) & (number < (int32_t)to);
}

/* Weights of half a panel's words or more, over the scores that they are made of, which were read already. */
ALWAYS_INLINE void store_weights(float *scores, ptrdiff_t column, lanes weights, int mode) {
    if (mode != PAIRS) {
        store(scores + column * LANES, weights);
        return;
    }
#if defined(__AVX512BF16__)
    __m256bh packed = _mm512_cvtneps_pbh((__m512)weights);
    memcpy(scores + column * LANES / 2, &packed, sizeof packed);
#else
    words bits = (words)weights;
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bf16 packed[LANES];
    for (int i = 0; i < LANES; i++)
        packed[i] = (bf16)bits[i];
    memcpy((bf16 *)scores + column * LANES, packed, sizeof packed);
#endif
}

/* Where one of a query's scores is above all before, what it has summed up fades against it. */
ALWAYS_INLINE void raise_top(lanes scores, float *top, float *total, float *sums, ptrdiff_t size) {
    if (!any_above(scores, *top))
        return;
    float before = *top, now = largest(scores);
    *top = now;
    if (before == -INFINITY)
        return;
    float fade = exp2_of(before - now);
    store(total, load(total) * fade);
    for (ptrdiff_t c = 0; c < size; c += LANES)
        store(sums + c, load(sums + c) * fade);
}

/* The base of a query's weights: its top, if it has one. */
ALWAYS_INLINE float base_of(float top) {
    return top == -INFINITY ? 0.0f : top;
}

#endif
