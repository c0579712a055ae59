#!/bin/sh -eu
# sh generate.sh DIRECTORY: writes driver_link.pb.go and driver_link_grpc.pb.go there.
# The plugins have the versions of tools.mod. $PROTOC is a command of your own, such as
# "python -m grpc_tools.protoc"; default: protoc.
cd "$(dirname "$0")"
plugin() { go tool -modfile=tools.mod -n "$1"; }
${PROTOC:-protoc} -I ../../proto drahealth/v1/driver_link.proto \
    --plugin="$(plugin protoc-gen-go)" --go_out="$1" \
    --plugin="$(plugin protoc-gen-go-grpc)" --go-grpc_out="$1" \
    --go_opt=Mdrahealth/v1/driver_link.proto=drahealthv1/,module=drahealthv1 \
    --go-grpc_opt=Mdrahealth/v1/driver_link.proto=drahealthv1/,module=drahealthv1
# The messages register themselves in registries of this package: in protobuf's global ones, a second copy of
# the package in a driver, such as a vendored one, would panic when the driver starts.
sed -i -e 's|^\(\t*\)File: protoimpl.DescBuilder{$|\1TypeRegistry: new(protoregistry.Types),\n&\n\1\tFileRegistry:  new(protoregistry.Files),|' \
    -e 's|^\tprotoimpl "google.golang.org/protobuf/runtime/protoimpl"$|\tprotoregistry "google.golang.org/protobuf/reflect/protoregistry"\n&|' \
    "$1/driver_link.pb.go"
gofmt -w "$1/driver_link.pb.go"
