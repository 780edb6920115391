// Each file of loops fills its part of a level's table, for the target that Highway has chosen.
#pragma once

#include "index/simd/kernels.h"

namespace wavekv::simd {

void SetDotKernels(Kernels* kernels);
void SetAccumulateKernels(Kernels* kernels);
void SetSketchKernels(Kernels* kernels);
void SetElementwiseKernels(Kernels* kernels);
void SetPanelKernels(Kernels* kernels);
void SetAssignKernels(Kernels* kernels);

// Extensions of AVX-512: where this processor has one, replaces the loops that gain by it, names
// the level, and returns true. `kernels` holds the AVX-512 level.
bool SetVnniKernels(Kernels* kernels);
bool SetBf16Kernels(Kernels* kernels);

}  // namespace wavekv::simd
