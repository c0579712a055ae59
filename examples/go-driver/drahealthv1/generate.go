// Package drahealthv1 is what a DRA driver and the drahealth agent say to each other, proto/drahealth/v1 in Go.
// `go generate` makes it anew.
package drahealthv1

//go:generate sh generate.sh .
