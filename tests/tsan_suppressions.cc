// What ThreadSanitizer cannot see, for every test of the `tsan` preset.
//
// absl::Status counts its references in libabsl_status, which Debian builds without
// instrumentation: the last Unref's release and acquire are lost, and its delete looks like a race
// with the Ref of a copy that another thread had and gave back. Only reports with Status::Unref in
// a stack go.

extern "C" const char* __tsan_default_suppressions() { return "race:absl::*Status::Unref(\n"; }
