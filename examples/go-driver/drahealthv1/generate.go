// Package drahealthv1 has the messages between a DRA driver and the drahealth agent, proto/drahealth/v1 in Go.
// `go generate` regenerates it.
package drahealthv1

//go:generate sh generate.sh .
