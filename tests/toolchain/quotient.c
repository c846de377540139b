// Does the one correction in `quotient` of casts/element.j2 decide as the IEEE quotient x / scale does, on
// every boundary where FP8 rounds? Prints the number of pairs tried and of those that go elsewhere.
//
// The boundaries are numbers b of five bits or less. The two quotients, both within a unit in the last place,
// can lie on different sides of one only if x / scale is within 2^-46 of a boundary of FP32 beside it: of b
// plus or minus half a unit. For an x that holds for one scale at most, the one nearest x / (b +- half a
// unit): it and its neighbours are tried, for every x whose low `shift` bits are zero (0: all). Powers of two
// do not matter.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Twice the five-bit number at or below, and one more between two of them.
static int place(float value) {
    int exponent;
    const double scaled = frexp(value, &exponent) * 32;
    return 2 * (int)floor(scaled) + (scaled != floor(scaled)) + 64 * exponent;
}

int main(int count, char** arguments) {
    const int shift = count > 1 ? atoi(arguments[1]) : 0;
    long tried = 0, wrong = 0, one_product = 0;
    for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa += 1u << shift) {
        const float x = from_bits(127u << 23 | mantissa);
        for (int five = 16; five < 32; ++five) {
            for (int side = -1; side <= 1; side += 2) {
                const double half = side < 0 && five == 16 ? ldexp(1, -25) : ldexp(1, -24);
                double scale = x / (five / 16.0 + side * half);
                if (scale < 1) scale *= 2;
                for (int step = -1; step <= 1; ++step) {
                    const float s = from_bits(to_bits((float)scale) + step);
                    const float inverse = 1.0f / s, q = x * inverse, exact = x / s;
                    const float corrected = fmaf(-fmaf(q, s, -x), inverse, q);
                    ++tried;
                    wrong += place(corrected) != place(exact);
                    one_product += place(q) != place(exact);
                }
            }
        }
    }
    printf("%ld %ld %ld\n", tried, wrong, one_product);
    return 0;
}
