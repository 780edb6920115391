// Propagation of absl::Status, in the shape of today's Abseil (Debian 12's has none).
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the enclosing function when `expr`, an absl::Status, is not OK.
#define WAVEKV_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    absl::Status wavekv_status_ = (expr);            \
    if (!wavekv_status_.ok()) return wavekv_status_; \
  } while (false)

#define WAVEKV_CONCAT_INNER_(a, b) a##b
#define WAVEKV_CONCAT_(a, b) WAVEKV_CONCAT_INNER_(a, b)

// Declares or assigns `lhs` from an absl::StatusOr, or returns its status.
#define WAVEKV_ASSIGN_OR_RETURN(lhs, expr) \
  WAVEKV_ASSIGN_OR_RETURN_IMPL_(WAVEKV_CONCAT_(wavekv_statusor_, __LINE__), lhs, expr)
#define WAVEKV_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                  \
  if (!tmp.ok()) return std::move(tmp).status();      \
  lhs = std::move(tmp).value()
