// What gRPC itself has to say, in a daemon.
#pragma once

namespace wavekv {

// From now on gRPC's messages are lines of the log like others (event=grpc). Its own way writes to
// stderr and waits there for a reader. GRPC_VERBOSITY decides which there are, as ever.
void TakeGrpcLog();

}  // namespace wavekv
