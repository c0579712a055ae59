// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

// Package drahealthv1 has the messages between a DRA driver and the drahealth agent, generated from
// proto/drahealth/v1/driver_link.proto. Drivers use package drahealth; this package is for tests with a fake
// agent, and for drivers that forward the agent's socket themselves.
//
// `go generate` regenerates it.
package drahealthv1

//go:generate sh generate.sh .
