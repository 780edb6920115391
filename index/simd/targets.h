// Which of Highway's targets are compiled; included before any header of Highway.
#pragma once

// The plain level is HWY_SCALAR whatever the compiler, and processors between it and AVX2 are not
// worth their compile time; nor are levels that differ from AVX-512 in instructions not used here.
#define HWY_BROKEN_EMU128 1
#if WAVEKV_HWY_VERSION >= 10005
#define HWY_DISABLED_TARGETS \
  (HWY_SSE2 | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
