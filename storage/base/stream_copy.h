// Copies for another core to read, and reading what it wrote.
#pragma once

#include <cstddef>

namespace wavekv {

// As memcpy, for memory that another core reads next and that this one does not. A plain store asks
// for its line first, which the other core has from reading what was there before: on some machines
// that takes five times as long as the copy. Where the processor can, this one stores past the
// caches; StreamFence must come before anybody is told that the bytes are there. Thread-safe.
void StreamCopy(void* target, const void* source, size_t bytes);

// Orders what this thread has streamed before whatever it stores next. Nothing else does.
void StreamFence();

// Asks for the lines of what another core wrote and this one is about to read, all at once: more of
// them are under way together than where they are asked for one after another. Bounded by itself.
void PrefetchStreamed(const void* source, size_t bytes);

}  // namespace wavekv
