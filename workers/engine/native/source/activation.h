/* Activations by the numbers that Python names them with (layers/activation.py has the formulas). */
#ifndef ACTIVATION_H
#define ACTIVATION_H

#include "lanes.h"

enum {
    ACTIVATION_NONE,
    ACTIVATION_SILU,
    ACTIVATION_GELU_TANH,
    ACTIVATION_GELU,
    ACTIVATION_RELU,
    ACTIVATION_RELU_SQUARED,
    ACTIVATION_QUICK_GELU
};

/* x / (1 + 2**t), with a relative error of about 3e-7; 0 for t of 126 and more, for x of -inf too, where torch has no
   number. */
ALWAYS_INLINE lanes gated_by(lanes x, lanes t) {
#if defined(__AVX512F__)
    __m512 limited = _mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)t);
    __m512 n = _mm512_roundscale_ps(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
        f = _mm512_sub_ps(limited, n);
    __m512 p = _mm512_set1_ps(1.326469877e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.671508817e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550733776e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402224215e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931469776e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __m512 below = _mm512_add_ps(_mm512_scalef_ps(p, n), _mm512_set1_ps(1.0f));
    __m512 inverse = _mm512_rcp14_ps(below);
    inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(below, inverse, _mm512_set1_ps(2.0f)));
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(126.0f), _CMP_NGE_UQ);
    return (lanes)_mm512_maskz_mul_ps(kept, (__m512)x, inverse);
#else
    return choose(t >= all(126.0f), all(0.0f), x / (exp2_lanes(t) + 1.0f));
#endif
}

/* x times the normal distribution's share below x, with an absolute error of about 2e-7 |x|: erfc(z) is a polynomial of
   1 / (1 + 0.42 z) times e**(-z**2), of the form of Hastings (1955), fitted for this polynomial's degree. */
ALWAYS_INLINE lanes gelu(lanes x) {
    lanes z = (lanes)((words)x & 0x7fffffffu) * 0.70710678f, t = 1.0f / (z * 0.42f + 1.0f);
    lanes p = t * -0.13809825f + 0.37329456f;
    p = p * t + 0.08744460f;
    p = p * t + 0.17403290f;
    p = p * t + 0.27351487f;
    p = p * t + 0.22981127f;
    lanes half = p * t * exp2_lanes(z * z * -1.44269504f) * 0.5f; /* of erfc(z) */
    return x * choose(x > all(0.0f), 1.0f - half, half);
}

ALWAYS_INLINE lanes activated(int activation, lanes x) {
    switch (activation) {
    case ACTIVATION_SILU:
        return gated_by(x, x * -1.44269504f);
    case ACTIVATION_GELU_TANH: /* 0.5 x (1 + tanh(z)) is x sigmoid(2 z) */
        return gated_by(x, x * (x * x * -0.10294324f - 2.3022082f));
    case ACTIVATION_GELU:
        return gelu(x);
    case ACTIVATION_RELU:
        return choose(x < all(0.0f), all(0.0f), x);
    case ACTIVATION_RELU_SQUARED:
        return choose(x < all(0.0f), all(0.0f), x * x);
    case ACTIVATION_QUICK_GELU:
        return gated_by(x, x * -2.4554669f);
    default:
        return x;
    }
}

/* Calls `function` with its first argument known to the compiler. */
#define WITH_ACTIVATION(function, activation, ...)               \
    switch (activation) {                                        \
    case ACTIVATION_SILU:                                        \
        function(ACTIVATION_SILU, __VA_ARGS__);                  \
        break;                                                   \
    case ACTIVATION_GELU_TANH:                                   \
        function(ACTIVATION_GELU_TANH, __VA_ARGS__);             \
        break;                                                   \
    case ACTIVATION_GELU:                                        \
        function(ACTIVATION_GELU, __VA_ARGS__);                  \
        break;                                                   \
    case ACTIVATION_RELU:                                        \
        function(ACTIVATION_RELU, __VA_ARGS__);                  \
        break;                                                   \
    case ACTIVATION_RELU_SQUARED:                                \
        function(ACTIVATION_RELU_SQUARED, __VA_ARGS__);          \
        break;                                                   \
    case ACTIVATION_QUICK_GELU:                                  \
        function(ACTIVATION_QUICK_GELU, __VA_ARGS__);            \
        break;                                                   \
    default:                                                     \
        function(ACTIVATION_NONE, __VA_ARGS__);                  \
    }

#endif
