package drahealth

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	pb "drahealth.example.com/go/drahealthv1"
)

// Operations of the driver, for Doing: an errno has another meaning in each.
const (
	Device = pb.Operation_OPERATION_DEVICE // opening, reading or setting up the device itself
	CDI    = pb.Operation_OPERATION_CDI    // writing a CDI file
	State  = pb.Operation_OPERATION_STATE  // its own checkpoint
	Config = pb.Operation_OPERATION_CONFIG // reading the claim's parameters
	API    = pb.Operation_OPERATION_API    // requesting from the API server
	Lock   = pb.Operation_OPERATION_LOCK   // waiting for its own lock
	Cgroup = pb.Operation_OPERATION_CGROUP // writing a cgroup's file
)

const (
	// evidenceCount is the agent's limit of pieces of evidence per failure.
	evidenceCount = 16
	// errorsMax limits the number of inspected errors: a chain may be endless.
	errorsMax = 64
)

// Doing marks an error with the operation that failed; nil stays nil. An error of Config without other
// evidence counts as invalid parameters of the user.
func Doing(operation pb.Operation, err error) error {
	if err == nil {
		return nil
	}
	return &doing{operation, err}
}

type doing struct {
	operation pb.Operation
	error
}

func (d *doing) Unwrap() error { return d.error }

// ClassifiedError is an error whose class the driver knows. Its text is a format as of fmt.Errorf,
// including %w: one line with the compared numbers. The same facts must give the same text, without
// times, addresses or counters, because Kubernetes throttles events with changing texts. The code is
// dotted, stable, and chosen by the driver: "fpga.bank_locked".
type ClassifiedError struct {
	class  pb.ErrorClass
	code   string
	device string
	after  time.Duration
	error
}

// Transient returns an error that may pass with a retry.
func Transient(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_TRANSIENT, code, "", format, args)
}

// BadConfig returns an error for an invalid request of the user: the claim must change.
func BadConfig(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_BAD_CONFIG, code, "", format, args)
}

// FailedDevice returns an error for a failed device of the claim, which becomes Unhealthy and gets a
// taint.
func FailedDevice(device, code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE, code, device, format, args)
}

// Permanent returns any other error that no retry can fix: the node or the driver must change.
func Permanent(code, format string, args ...any) *ClassifiedError {
	return classified(pb.ErrorClass_ERROR_CLASS_PERMANENT, code, "", format, args)
}

func classified(class pb.ErrorClass, code, device, format string, args []any) *ClassifiedError {
	return &ClassifiedError{class: class, code: code, device: device, error: fmt.Errorf(format, args...)}
}

// After sets the earliest time of a useful retry.
func (w *ClassifiedError) After(pause time.Duration) *ClassifiedError {
	w.after = pause
	return w
}

func (w *ClassifiedError) Unwrap() error { return w.error }

// Nvml marks an error with the return code of NVML and the device of the claim, "" if unknown. With
// github.com/NVIDIA/go-nvml: drahealth.Nvml(int(ret), "gpu-3", ret). An error with a method
// NvmlReturn() int has the same effect.
func Nvml(code int, device string, err error) error {
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
func (e *nvmlError) NvmlReturn() int { return e.code }

// Evidence returns the evidence in an error, outermost first: marks of this package, errno with its
// file, timeouts, gRPC or API server status, NVML return codes; the text comes last and has the least
// weight. It follows Unwrap of one and of several errors.
func Evidence(err error) []*pb.Evidence {
	if err == nil {
		return nil
	}
	w := walk{whole: evidenceText(err.Error())}
	w.errors(err, place{})
	found := w.found[:min(len(w.found), evidenceCount-1)]
	return append(found, &pb.Evidence{Kind: &pb.Evidence_Text{Text: w.whole}})
}

// place is the operation and the path from the outer errors.
type place struct {
	operation pb.Operation
	path      string
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
	case *fs.PathError:
		at.path = e.Path
	case *os.LinkError:
		at.path = e.New
	}
	w.shown(err, at)
	inner := within(err)
	for _, one := range inner {
		w.errors(one, at)
	}
	if len(inner) == 0 {
		w.late(err, at)
	}
	if _, marked := err.(*doing); marked && at.operation == Config && len(w.found) == before {
		w.add(&pb.Evidence{Kind: &pb.Evidence_DecodeError{DecodeError: &pb.DecodeError{
			By: typeOf(err), Text: evidenceText(err.Error()),
		}}})
	}
}

// within returns the errors that an error wraps.
func within(err error) []error {
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if one := e.Unwrap(); one != nil {
			return []error{one}
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
				Number: int64(e), Operation: at.operation, Path: evidenceText(at.path), Text: w.whole,
			}}})
		}
	case *ClassifiedError:
		w.add(&pb.Evidence{Kind: &pb.Evidence_DriverError{DriverError: &pb.DriverReportedError{
			ErrorClass:  e.class,
			Code:        evidenceText(e.code),
			Summary:     cutRunes(oneLine(e.Error()), summaryMax),
			Device:      evidenceText(e.device),
			RetryAfterS: max(0, min(e.after, 24*time.Hour)).Seconds(),
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
	case interface{ NvmlReturn() int }:
		if code := e.NvmlReturn(); 1 <= code && code <= 999 {
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
		By: by, Operation: at.operation, Text: w.whole,
	}}})
}

func (w *walk) add(evidence *pb.Evidence) { w.found = append(w.found, evidence) }

// typeOf returns the type of the innermost error, or "decoder" for a type without meaning.
func typeOf(err error) string {
	for range errorsMax {
		if inner := errors.Unwrap(err); inner != nil {
			err = inner
		}
	}
	name := strings.TrimPrefix(fmt.Sprintf("%T", err), "*")
	if strings.HasPrefix(name, "errors.") || strings.HasPrefix(name, "fmt.") {
		return "decoder"
	}
	return name
}

// evidenceText makes a text valid UTF-8 within the agent's limit.
func evidenceText(text string) string {
	return cutBytes(strings.ToValidUTF8(text, "\uFFFD"), evidenceMax)
}
