#include "tests/gpu/cuda_fixture.h"

#include <gmock/gmock.h>

namespace wavekv {

void ExpectRefused(const CudaRefusal& row) {
  SCOPED_TRACE(row.name);
  const TempDir directory;
  std::vector<std::string> arguments = {ProgramPath("wavebufferd"), "--backend=cuda",
                                        "--listen=unix:" + directory.path() + "/w.sock"};
  arguments.insert(arguments.end(), row.flags.begin(), row.flags.end());
  ChildProcess process(arguments);
  EXPECT_EQ(process.WaitForExit(), row.exit_code);
  for (const std::string& text : row.says) {
    EXPECT_THAT(process.output(), testing::HasSubstr(text));
  }
}

}  // namespace wavekv
