#!/bin/sh -eu
# sh generate.sh DIRECTORY: writes driver_link.pb.go and driver_link_grpc.pb.go there.
# The plugins are tools of this module, in the versions that go.mod names. $PROTOC is a command of your own,
# such as "python -m grpc_tools.protoc"; default: protoc.
cd "$(dirname "$0")"
${PROTOC:-protoc} -I ../../../proto drahealth/v1/driver_link.proto \
    --plugin="$(go tool -n protoc-gen-go)" --go_out="$1" \
    --plugin="$(go tool -n protoc-gen-go-grpc)" --go-grpc_out="$1" \
    --go_opt=Mdrahealth/v1/driver_link.proto=drahealthv1/,module=drahealthv1 \
    --go-grpc_opt=Mdrahealth/v1/driver_link.proto=drahealthv1/,module=drahealthv1
