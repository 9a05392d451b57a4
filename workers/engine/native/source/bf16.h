/* bfloat16: the upper half of a float. Rounds to the nearest, ties to even, as torch does. */
#ifndef BF16_H
#define BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_bf16(bf16 x) {
    return float_of_bits((uint32_t)x << 16);
}

static inline bf16 bf16_of_float(float x) {
    uint32_t bits = bits_of_float(x);
    uint32_t quiet = (bits >> 16) | 0x40u; /* of what is not a number, which rounding could make infinite */
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

#endif
