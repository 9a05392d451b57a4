/* Vectors as wide as the processor's registers, in the compilers' own notation. What is stored as numbers of 2 or 4
   bytes is read as words: a word is one float, or a pair of bf16, and one multiplication of words does the one product
   or the two. */
#ifndef LANES_H
#define LANES_H

#include <math.h>
#include <stddef.h>

#include "bf16.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define NEVER_INLINE static __attribute__((noinline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));

ALWAYS_INLINE lanes load(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Numbers in float16, where the processor converts them. */
#if defined(__AVX512F__)
#define HAS_F16 1
ALWAYS_INLINE lanes load_f16(const uint16_t *from) {
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
}
#elif defined(__F16C__)
#define HAS_F16 1
ALWAYS_INLINE lanes load_f16(const uint16_t *from) {
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
}
#elif defined(__aarch64__)
#define HAS_F16 1
ALWAYS_INLINE lanes load_f16(const uint16_t *from) {
    return (lanes)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}
#else
#define HAS_F16 0
ALWAYS_INLINE lanes load_f16(const uint16_t *from) {
    (void)from;
    return (lanes){0};
}
#endif

ALWAYS_INLINE float float_of_f16(uint16_t x) {
    uint16_t all[LANES] = {x};
    return load_f16(all)[0];
}

ALWAYS_INLINE words load_words(const void *from) {
    words x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Pairs of int8 as pairs of int16. */
ALWAYS_INLINE words load_pairs(const int8_t *from) {
#if defined(__AVX512BW__)
    return (words)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
#elif defined(__AVX2__) && LANES == 8
    return (words)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
#elif defined(__aarch64__)
    return (words)vmovl_s8(vld1_s8(from));
#else
    int16_t numbers[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++)
        numbers[i] = from[i];
    return load_words(numbers);
#endif
}

typedef uint16_t unsigned_shorts __attribute__((vector_size(4 * LANES)));
typedef uint8_t octets __attribute__((vector_size(LANES)));

/* Pairs of numbers of 4 bits: part 0 to 3 of words that hold four of them each. */
ALWAYS_INLINE words unpacked_pairs(words packed, int part) {
    words shifted = (words)((unsigned_shorts)packed >> 4 * part);
    return part == 3 ? shifted : shifted & 0x000f000fu;
}

ALWAYS_INLINE words pair_difference(words a, words b) {
    return (words)((unsigned_shorts)a - (unsigned_shorts)b);
}

ALWAYS_INLINE words load_octets(const uint8_t *from) {
    octets numbers;
    memcpy(&numbers, from, sizeof numbers);
    return __builtin_convertvector(numbers, words);
}

/* sum plus both products of two pairs of int16. */
ALWAYS_INLINE integers add_products(integers sum, words a, words b) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && LANES == 8
    return sum + (integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
    int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return sum + (integers)vpaddq_s32(low, high);
#else
    integers x = (integers)a, y = (integers)b;
    return sum + (x >> 16) * (y >> 16) + ((integers)(a << 16) >> 16) * ((integers)(b << 16) >> 16);
#endif
}

ALWAYS_INLINE void store_words(uint32_t *to, words x) {
    memcpy(to, &x, sizeof x);
}

ALWAYS_INLINE void store(float *to, lanes x) {
    memcpy(to, &x, sizeof x);
}

ALWAYS_INLINE lanes all(float x) {
    return x - (lanes){0}; /* compilers drop this, and not 0 + x, which is 0 for -0 */
}

/* sum + a * b, rounded once where the processor can: compilers may do so here and not there. */
ALWAYS_INLINE lanes fused(lanes sum, lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (lanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

ALWAYS_INLINE lanes choose(integers mask, lanes yes, lanes no) {
    return (lanes)(((integers)yes & mask) | ((integers)no & ~mask));
}

/* The first halves of two vectors, number by number in turn, and their second halves. */
#if LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define MIXED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define MIXED(x, y, ...) __builtin_shuffle(x, y, (integers){__VA_ARGS__})
#endif

/* Rows of a square become its columns. */
ALWAYS_INLINE void transpose(words square[LANES]) {
    words mixed[LANES];
    for (int size = LANES; size > 1; size /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = MIXED(square[i], square[i + LANES / 2], FIRST_HALVES);
            mixed[2 * i + 1] = MIXED(square[i], square[i + LANES / 2], SECOND_HALVES);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            square[i] = mixed[i];
    }
}

/* Where either is no number, y. */
ALWAYS_INLINE lanes larger(lanes x, lanes y) {
#if defined(__AVX512F__)
    return (lanes)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return choose(x > y, x, y);
#endif
}

ALWAYS_INLINE float largest(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++)
        most = x[i] > most ? x[i] : most;
    return most;
#endif
}

/* Whether any is above y. */
ALWAYS_INLINE int any_above(lanes x, float y) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_GT_OQ) != 0;
#else
    return largest(x) > y;
#endif
}

ALWAYS_INLINE float added_up(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum[LANES];
    memcpy(sum, &x, sizeof sum);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
#endif
}

/* (2**x - 1) / x for x in [-1/2, 1/2]: a polynomial. */
ALWAYS_INLINE lanes exp2_slope(lanes x) {
    lanes p = x * 1.326438879e-3f + 9.671515677e-3f;
    p = p * x + 5.550734876e-2f;
    p = p * x + 2.402224202e-1f;
    return p * x + 6.931469768e-1f;
}

/* 2**x with a relative error of about 2e-7, and exactly 1 for 0: 2**n times a polynomial on [-1/2, 1/2]. No less than
   2**-127. */
ALWAYS_INLINE lanes exp2_lanes(lanes x) {
    lanes limited = larger(all(-127.0f), x);
#if defined(__AVX512F__)
    lanes n = (lanes)_mm512_roundscale_ps((__m512)limited, 0);
#else
    const lanes rounding = all(12582912.0f); /* 1.5 * 2**23: the sum's last bits are the rounded number */
    lanes shifted = limited + rounding, n = shifted - rounding;
#endif
    lanes f = limited - n;
    lanes p = exp2_slope(f) * f + 1.0f;
#if defined(__AVX512F__)
    return (lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (lanes)(((words)shifted << 23) + 0x3f800000u);
#endif
}

ALWAYS_INLINE float exp2_of(float x) {
    return exp2_lanes(all(x))[0];
}

/* With a relative error of at most 8e-7, also near 0: of d = 2**y - 1 for y = -2 log2(e) |x| it is d / (d + 2). */
ALWAYS_INLINE lanes tanh_lanes(lanes x) {
    const lanes rounding = all(12582912.0f); /* as above */
    lanes y = larger(all(-40.0f), (lanes)((words)x | 0x80000000u) * 2.88539008f);
    lanes n = (y + rounding) - rounding, f = y - n, power = exp2_lanes(n);
    lanes d = power * f * exp2_slope(f) + (power - 1.0f);
    return (lanes)(((words)(d / (d + 2.0f)) & 0x7fffffffu) | ((words)x & 0x80000000u));
}

ALWAYS_INLINE words repeated(const uint32_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word); /* which may have been stored as two numbers */
#if defined(__AVX512F__)
    /* of a float, since this one is read from memory as it is repeated */
    return (words)_mm512_set1_ps(float_of_bits(word));
#else
    return (words){0} + word;
#endif
}

/* How attention multiplies words: queries and cache in float; both in bf16, two numbers in a word; or queries in float
   and the cache in bf16. */
enum { FLOATS, PAIRS, FLOATS_BY_PAIRS };

/* What one word of the other side is multiplied with. */
typedef struct {
    words first, second; /* the latter only where two floats are */
} factor;

/* Words of a factor. */
ALWAYS_INLINE ptrdiff_t factor_words(int mode) {
    return mode == FLOATS_BY_PAIRS ? 2 : 1;
}

ALWAYS_INLINE factor repeated_factor(const uint32_t *from, int mode) {
    return (factor){repeated(from), repeated(mode == FLOATS_BY_PAIRS ? from + 1 : from)};
}

/* sum + a * b in each lane, of one product or of two. */
ALWAYS_INLINE lanes multiply_add(lanes sum, factor a, words b, int mode) {
    if (mode == FLOATS)
        return sum + (lanes)a.first * (lanes)b;
    lanes low = (lanes)(b << 16), high = (lanes)(b & 0xffff0000u);
    if (mode == FLOATS_BY_PAIRS)
        return sum + (lanes)a.first * low + (lanes)a.second * high;
#if defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a.first);
#else
    return sum + (lanes)(a.first << 16) * low + (lanes)(a.first & 0xffff0000u) * high;
#endif
}

/* Numbers of a row, in float or in bf16, as floats, and back. */
ALWAYS_INLINE void widen(float *to, const void *from, ptrdiff_t count, int is_bf16) {
    if (!is_bf16)
        memcpy(to, from, (size_t)count * sizeof(float));
    else
        for (ptrdiff_t i = 0; i < count; i++)
            to[i] = float_of_bf16(((const bf16 *)from)[i]);
}

ALWAYS_INLINE void narrow(void *to, const float *from, ptrdiff_t count, int is_bf16) {
    if (!is_bf16) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    ptrdiff_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + LANES <= count; i += LANES) {
        __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(from + i));
        memcpy((bf16 *)to + i, &rounded, sizeof rounded);
    }
#endif
    for (; i < count; i++)
        ((bf16 *)to)[i] = bf16_of_float(from[i]);
}

#endif
