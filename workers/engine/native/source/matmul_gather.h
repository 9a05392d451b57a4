/* What tiles have in common whose x is in words, pairs of bf16 (matmul_bf16.h) or quads of int8 (matmul_quads.h): what
   they prefetch, and rows of x, gathered, by AVX-512. */
#ifndef MATMUL_GATHER_H
#define MATMUL_GATHER_H

#include "lanes.h"
#include "matmul.h"

/* Of a tile whose sums stay in registers. */
enum { MOST_ROWS = LANES == 16 ? 12 : MULTIPLIES_MATRICES ? 6 : 3 };

/* What a tile prefetches while it computes: so many lines of the cache for each part of k, from `at` on. */
typedef struct {
    const char *at;
    int lines;
} prefetching;

#if defined(__AVX512F__)

/* The first `count` of 16 words of each row. */
ALWAYS_INLINE void gather_words(const uint32_t *x, ptrdiff_t words, int rows, int count, uint32_t *to) {
    __m512i a[16], b[16];
    __mmask16 there = (__mmask16)((1u << count) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_maskz_loadu_epi32(there, x + i * words) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    __m512i out[16]; /* a[4 i + c] has word 4 lane + c of the rows from 4 i */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i p = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i r = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), s = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        out[c] = _mm512_shuffle_i32x4(p, q, 0x88), out[8 + c] = _mm512_shuffle_i32x4(p, q, 0xdd);
        out[4 + c] = _mm512_shuffle_i32x4(r, s, 0x88), out[12 + c] = _mm512_shuffle_i32x4(r, s, 0xdd);
    }
    __mmask16 kept = (__mmask16)((1u << rows) - 1);
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
        if (c < count)
            _mm512_mask_storeu_epi32(to + c * rows, kept, out[c]);
}

/* x [rows][words] as [words][rows], for one tile: one stream of memory instead of twelve, whose distance may be one that
   a cache bears badly. */
static void gather_rows(const uint32_t *x, ptrdiff_t words, int rows, uint32_t *to) {
    for (ptrdiff_t j = 0; j < words; j += 16)
        gather_words(x + j, words, rows, words - j < 16 ? (int)(words - j) : 16, to + j * rows);
}

#endif
#endif
