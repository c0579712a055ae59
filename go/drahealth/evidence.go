// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	pb "drahealth.example.com/go/drahealthv1"
)

// Operation is an operation of the driver, for Doing: an errno has another meaning in each.
type Operation int32

// The operations of a driver.
const (
	OpDevice = Operation(pb.Operation_OPERATION_DEVICE) // opening, reading or setting up the device itself
	OpCDI    = Operation(pb.Operation_OPERATION_CDI)    // writing a CDI file
	OpState  = Operation(pb.Operation_OPERATION_STATE)  // its own checkpoint
	OpConfig = Operation(pb.Operation_OPERATION_CONFIG) // reading the claim's parameters
	OpAPI    = Operation(pb.Operation_OPERATION_API)    // requesting from the API server
	OpLock   = Operation(pb.Operation_OPERATION_LOCK)   // waiting for its own lock
	OpCgroup = Operation(pb.Operation_OPERATION_CGROUP) // writing a cgroup's file
)

// String returns the operation in one word, such as "cdi".
func (o Operation) String() string {
	return strings.ToLower(strings.TrimPrefix(pb.Operation(o).String(), "OPERATION_"))
}

const (
	// evidenceCount is the agent's limit of pieces of evidence per failure.
	evidenceCount = 16
	// errorsMax limits the number of inspected errors: a chain may be endless.
	errorsMax = 64
	// requestsMax is the agent's limit of requests of an error.
	requestsMax = 128
	// noType replaces the type of an error that is only a text.
	noType = "decoder"
)

// Doing marks an error with the operation that failed; nil stays nil. An error of OpConfig without other
// evidence counts as invalid parameters of the user. Of other operations the agent knows errors of encoding/json
// and gopkg.in/yaml, such as a corrupt checkpoint, and of failed connections: types of net (except those of
// addresses that cannot be parsed), crypto/tls and crypto/x509.
func Doing(operation Operation, err error) error {
	if err == nil {
		return nil
	}
	return &doing{operation, err}
}

// ForRequests marks an error with the requests of the claim that failed, by their names in the claim; nil stays
// nil. Without it a classified error concerns all requests of the claim. The verdict, and so the pod's event, names
// only the devices of these requests, unless a device itself failed.
func ForRequests(err error, requests ...string) error {
	if err == nil {
		return nil
	}
	return &forRequests{requests, err}
}

type forRequests struct {
	requests []string
	error
}

func (e *forRequests) Unwrap() error { return e.error }

type doing struct {
	operation Operation
	error
}

func (d *doing) Unwrap() error { return d.error }

// ClassifiedError is an error whose class the driver knows. Its text is a format as of fmt.Errorf,
// including %w: one line with the compared numbers. The same facts must give the same text, without
// times, addresses or counters, because Kubernetes throttles events with changing texts. The code is
// dotted, stable, and chosen by the driver: "fpga.bank_locked".
//
// It does not change after its creation and may be a package variable.
type ClassifiedError struct {
	class  pb.ErrorClass
	code   string
	device string
	after  time.Duration
	origin *ClassifiedError // for errors.Is; nil: this one
	error
}

// Transient returns an error that may pass with a retry.
func Transient(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_TRANSIENT, code, "", fmt.Errorf(format, args...))
}

// BadConfig returns an error for an invalid request of the user: the claim must change.
func BadConfig(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_BAD_CONFIG, code, "", fmt.Errorf(format, args...))
}

// FailedDevice returns an error for a failed device of the claim, which becomes Unhealthy and gets a
// taint.
func FailedDevice(device, code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE, code, device, fmt.Errorf(format, args...))
}

// Permanent returns any other error that no retry can fix: the node or the driver must change.
func Permanent(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_PERMANENT, code, "", fmt.Errorf(format, args...))
}

func classified(class pb.ErrorClass, code, device string, err error) *ClassifiedError {
	return &ClassifiedError{class: class, code: code, device: device, error: err}
}

// After returns a copy of the error with the earliest time of a useful retry. For errors.Is the copy is
// the original.
func (w *ClassifiedError) After(pause time.Duration) *ClassifiedError {
	copied := *w
	copied.after, copied.origin = pause, cmp.Or(w.origin, w)
	return &copied
}

// Is reports whether target is the error of which this one is a copy.
func (w *ClassifiedError) Is(target error) bool { return w.origin != nil && target == error(w.origin) }

// Unwrap returns the error with the text, which may wrap others.
func (w *ClassifiedError) Unwrap() error { return w.error }

// NVMLReturn marks an error with the return code of NVML and the device of the claim, "" if unknown. With
// github.com/NVIDIA/go-nvml: drahealth.NVMLReturn(int(ret), "gpu-3", ret). An error with a method
// NVMLReturn() int has the same effect.
func NVMLReturn(code int, device string, err error) error {
	if err == nil {
		err = fmt.Errorf("NVML returned %d", code)
	}
	return &nvmlError{code, device, err}
}

type nvmlError struct {
	code   int
	device string
	error
}

func (e *nvmlError) Unwrap() error   { return e.error }
func (e *nvmlError) NVMLReturn() int { return e.code }

// Evidence returns what the agent gets of an error, a line for each piece, for logs and for the driver's
// tests. Outermost first: marks of this package, errno with its file, timeouts, gRPC or API server
// status, NVML return codes, types of errors of an operation; the text comes last and has the least weight.
// Errors that are wrapped count, one or several; an error that was formatted with %v instead of %w is text only.
func Evidence(err error) []string {
	var lines []string
	for _, piece := range evidenceOf(err) {
		lines = append(lines, lineOf(piece))
	}
	return lines
}

func lineOf(evidence *pb.Evidence) string {
	switch kind := evidence.GetKind().(type) {
	case *pb.Evidence_DriverError:
		e := kind.DriverError
		line := fmt.Sprintf("driver-error class=%s code=%s", classOf(e.GetErrorClass()), e.GetCode())
		if e.GetDevice() != "" {
			line += " device=" + e.GetDevice()
		}
		if e.GetRetryAfterS() > 0 {
			line += fmt.Sprintf(" retry-after=%gs", e.GetRetryAfterS())
		}
		line += requestsOf(e.GetRequests())
		return line + fmt.Sprintf(" summary=%q", e.GetSummary())
	case *pb.Evidence_Errno:
		e := kind.Errno
		line := fmt.Sprintf("errno number=%d operation=%s", e.GetNumber(), Operation(e.GetOperation()))
		if e.GetPath() != "" {
			line += fmt.Sprintf(" path=%q", e.GetPath())
		}
		return line
	case *pb.Evidence_Nvml:
		line := fmt.Sprintf("nvml code=%d", kind.Nvml.GetCode())
		if kind.Nvml.GetDevice() != "" {
			line += " device=" + kind.Nvml.GetDevice()
		}
		return line
	case *pb.Evidence_Grpc:
		return fmt.Sprintf("grpc code=%s message=%q", codes.Code(kind.Grpc.GetCode()), kind.Grpc.GetMessage())
	case *pb.Evidence_Http:
		return fmt.Sprintf("http status=%d reason=%s", kind.Http.GetStatus(), kind.Http.GetReason())
	case *pb.Evidence_Timeout:
		return fmt.Sprintf("timeout by=%s operation=%s", kind.Timeout.GetBy(), Operation(kind.Timeout.GetOperation()))
	case *pb.Evidence_DecodeError:
		return fmt.Sprintf("decode-error by=%s%s text=%q", kind.DecodeError.GetBy(),
			requestsOf(kind.DecodeError.GetRequests()), kind.DecodeError.GetText())
	case *pb.Evidence_OperationFailure:
		e := kind.OperationFailure
		return fmt.Sprintf("operation-failure by=%s operation=%s", e.GetBy(), Operation(e.GetOperation()))
	default:
		return fmt.Sprintf("text %q", evidence.GetText())
	}
}

func requestsOf(requests []string) string {
	if len(requests) == 0 {
		return ""
	}
	return " request=" + strings.Join(requests, ",")
}

// evidenceOf returns the evidence in an error; see Evidence.
func evidenceOf(err error) []*pb.Evidence {
	if err == nil {
		return nil
	}
	w := walk{whole: evidenceText(err.Error())}
	w.errors(err, place{})
	return cutEvidence(append(w.found, &pb.Evidence{Kind: &pb.Evidence_Text{Text: w.whole}}), evidenceCount)
}

// cutEvidence cuts the evidence in an error to at most limit pieces. The last one, the error's text, stays.
func cutEvidence(found []*pb.Evidence, limit int) []*pb.Evidence {
	if len(found) <= limit {
		return found
	}
	return append(found[:limit-1], found[len(found)-1])
}

// place is the operation, the path and the requests from the outer errors.
type place struct {
	operation Operation
	path      string
	requests  []string
}

type walk struct {
	whole string
	found []*pb.Evidence
	seen  int
}

func (w *walk) errors(err error, at place) {
	if w.seen++; err == nil || w.seen > errorsMax {
		return
	}
	before := len(w.found)
	switch e := err.(type) {
	case *doing:
		at.operation = e.operation
	case *forRequests:
		at.requests = requestNames(e.requests)
	case *fs.PathError:
		at.path = e.Path
	case *os.LinkError:
		at.path = e.New
	}
	w.shown(err, at)
	inner := within(err)
	for _, wrapped := range inner {
		w.errors(wrapped, at)
	}
	if len(inner) == 0 {
		w.late(err, at)
		if len(w.found) == before {
			w.typed(err, at)
		}
	}
	if _, marked := err.(*doing); marked && at.operation == OpConfig && len(w.found) == before {
		w.add(&pb.Evidence{Kind: &pb.Evidence_DecodeError{DecodeError: &pb.DecodeError{
			By: typeOf(err), Text: evidenceText(err.Error()), Requests: requestsIn(err, at),
		}}})
	}
}

// within returns the errors that an error wraps.
func within(err error) []error {
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if wrapped := e.Unwrap(); wrapped != nil {
			return []error{wrapped}
		}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	}
	return nil
}

// shown adds the evidence of one error without those that it wraps.
func (w *walk) shown(err error, at place) {
	switch e := err.(type) {
	case syscall.Errno:
		if 1 <= e && e <= 4095 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Errno{Errno: &pb.Errno{
				Number: int64(e), Operation: pb.Operation(at.operation), Path: evidenceText(at.path), Text: w.whole,
			}}})
		}
	case *ClassifiedError:
		w.add(&pb.Evidence{Kind: &pb.Evidence_DriverError{DriverError: &pb.DriverReportedError{
			ErrorClass:  e.class,
			Code:        evidenceText(e.code),
			Summary:     cutRunes(oneLine(e.Error()), summaryMax),
			Device:      evidenceText(e.device),
			RetryAfterS: max(0, min(e.after, 24*time.Hour)).Seconds(),
			Requests:    at.requests,
		}}})
	case apierrors.APIStatus:
		reported := e.Status()
		if 400 <= reported.Code && reported.Code <= 599 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Http{Http: &pb.HttpStatus{
				Status:     int64(reported.Code),
				Reason:     evidenceText(string(reported.Reason)),
				Message:    evidenceText(reported.Message),
				Kubernetes: true,
			}}})
		}
	case interface{ GRPCStatus() *status.Status }:
		if reported := e.GRPCStatus(); 1 <= reported.Code() && reported.Code() <= 16 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Grpc{Grpc: &pb.GrpcStatus{
				Code: int64(reported.Code()), Message: evidenceText(reported.Message()),
			}}})
		}
	case interface{ NVMLReturn() int }:
		if code := e.NVMLReturn(); 1 <= code && code <= 999 {
			reported := &pb.NvmlReturn{Code: int64(code)}
			if named, ok := e.(*nvmlError); ok {
				reported.Device = evidenceText(named.device)
			}
			w.add(&pb.Evidence{Kind: &pb.Evidence_Nvml{Nvml: reported}})
		}
	}
}

// late adds an innermost timeout error. Outer errors only forward Timeout(), and an errno is evidence
// by itself.
func (w *walk) late(err error, at place) {
	timed, ok := err.(interface{ Timeout() bool })
	if _, numbered := err.(syscall.Errno); !ok || numbered || !timed.Timeout() {
		return
	}
	by := typeOf(err)
	switch err {
	case context.DeadlineExceeded:
		by = "context.DeadlineExceeded"
	case os.ErrDeadlineExceeded:
		by = "os.ErrDeadlineExceeded"
	}
	w.add(&pb.Evidence{Kind: &pb.Evidence_Timeout{Timeout: &pb.Timeout{
		By: by, Operation: pb.Operation(at.operation), Text: w.whole,
	}}})
}

// typed adds the type of an innermost error of an operation. All errors of OpConfig count as a DecodeError.
func (w *walk) typed(err error, at place) {
	by := typeOf(err)
	if by == noType || at.operation == 0 || at.operation == OpConfig {
		return
	}
	w.add(&pb.Evidence{Kind: &pb.Evidence_OperationFailure{OperationFailure: &pb.OperationFailure{
		By: evidenceText(by), Operation: pb.Operation(at.operation), Text: w.whole,
	}}})
}

// requestsIn returns the requests that an error below names, else those from the outer errors.
func requestsIn(err error, at place) []string {
	for range errorsMax { // not errors.As: a chain may be endless
		if named, ok := err.(*forRequests); ok {
			return requestNames(named.requests)
		}
		err = errors.Unwrap(err)
	}
	return at.requests
}

// requestNames returns the names that the agent accepts: a wrong one must not cost the class of the error.
func requestNames(requests []string) []string {
	var names []string
	for _, name := range requests[:min(len(requests), requestsMax)] {
		if len(validation.IsDNS1123Label(name)) == 0 || isSubrequest(name) {
			names = append(names, name)
		}
	}
	return names
}

func isSubrequest(name string) bool {
	request, sub, found := strings.Cut(name, "/")
	return found && len(validation.IsDNS1123Label(request)) == 0 && len(validation.IsDNS1123Label(sub)) == 0
}

func (w *walk) add(evidence *pb.Evidence) { w.found = append(w.found, evidence) }

// typeOf returns the type of the innermost error, or noType for a type without meaning.
func typeOf(err error) string {
	for range errorsMax {
		if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
	}
	name := strings.TrimPrefix(fmt.Sprintf("%T", err), "*")
	if strings.HasPrefix(name, "errors.") || strings.HasPrefix(name, "fmt.") {
		return noType
	}
	return name
}

// evidenceText makes a text valid UTF-8 within the agent's limit.
func evidenceText(text string) string {
	return cutBytes(strings.ToValidUTF8(text, "\uFFFD"), evidenceMax)
}
