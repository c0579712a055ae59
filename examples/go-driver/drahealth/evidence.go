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

	pb "drahealth.example.com/go-driver/drahealthv1"
)

// What the driver was doing, for Doing: the same errno means something else in each.
const (
	Device = pb.Operation_OPERATION_DEVICE // opening, reading or setting up the device itself
	CDI    = pb.Operation_OPERATION_CDI    // writing a CDI file
	State  = pb.Operation_OPERATION_STATE  // its own checkpoint
	Config = pb.Operation_OPERATION_CONFIG // reading what the user asked for
	API    = pb.Operation_OPERATION_API    // asking the API server
	Lock   = pb.Operation_OPERATION_LOCK   // waiting for its own lock
	Cgroup = pb.Operation_OPERATION_CGROUP // writing a cgroup's file
)

const (
	// evidenceCount is how many pieces the agent takes of one failure.
	evidenceCount = 16
	// errorsMax is how many errors are looked at, for a chain that never ends.
	errorsMax = 64
)

// Doing notes in an error what was being done; nil stays nil. An error while Config was read of which
// nothing else is known is the user's mistake: what was asked for cannot be read.
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

// Word is an error of which the driver itself knows what kind it is. Its text is a format as of
// fmt.Errorf, %w included: one line with the numbers that were compared. The same facts must give the
// same text, or Kubernetes' events are throttled: no times, addresses or counters. The code is
// dotted, stable, and the driver's own, "fpga.bank_locked".
type Word struct {
	class  pb.ErrorClass
	code   string
	device string
	after  time.Duration
	error
}

// Transient is what trying again can help against.
func Transient(code, format string, args ...any) *Word {
	return word(pb.ErrorClass_ERROR_CLASS_TRANSIENT, code, "", format, args)
}

// BadConfig is what the user asked for and can never have: the claim must change.
func BadConfig(code, format string, args ...any) *Word {
	return word(pb.ErrorClass_ERROR_CLASS_BAD_CONFIG, code, "", format, args)
}

// FailedDevice is a device of the claim that is broken, by its name: it becomes Unhealthy, and is to
// be tainted.
func FailedDevice(device, code, format string, args ...any) *Word {
	return word(pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE, code, device, format, args)
}

// Permanent is neither: the node or the driver must change.
func Permanent(code, format string, args ...any) *Word {
	return word(pb.ErrorClass_ERROR_CLASS_PERMANENT, code, "", format, args)
}

func word(class pb.ErrorClass, code, device, format string, args []any) *Word {
	return &Word{class: class, code: code, device: device, error: fmt.Errorf(format, args...)}
}

// After says when trying again can help at the earliest.
func (w *Word) After(pause time.Duration) *Word {
	w.after = pause
	return w
}

func (w *Word) Unwrap() error { return w.error }

// Nvml notes in an error what NVML returned, and of which device of the claim; a device that is not
// known is "". With github.com/NVIDIA/go-nvml: drahealth.Nvml(int(ret), "gpu-3", ret). Any other
// error with a method NvmlReturn() int is understood as well.
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

// Evidence is what an error shows of what kind it is, the outermost first: marks of this package, the
// kernel's errno with its file, what was late, the status of gRPC or of the API server, what NVML
// returned; last the text, of which the agent makes the least. It follows Unwrap, of one error and of
// several.
func Evidence(err error) []*pb.Evidence {
	if err == nil {
		return nil
	}
	w := walk{whole: evidenceText(err.Error())}
	w.errors(err, place{})
	found := w.found[:min(len(w.found), evidenceCount-1)]
	return append(found, &pb.Evidence{Kind: &pb.Evidence_Text{Text: w.whole}})
}

// place is what the errors around one say of it.
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
		w.add(&pb.Evidence{Kind: &pb.Evidence_Undecoded{Undecoded: &pb.Undecoded{
			By: typeOf(err), Text: evidenceText(err.Error()),
		}}})
	}
}

// within is what an error wraps.
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

// shown adds what an error shows by itself.
func (w *walk) shown(err error, at place) {
	switch e := err.(type) {
	case syscall.Errno:
		if 1 <= e && e <= 4095 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Errno{Errno: &pb.Errno{
				Number: int64(e), Operation: at.operation, Path: evidenceText(at.path), Text: w.whole,
			}}})
		}
	case *Word:
		w.add(&pb.Evidence{Kind: &pb.Evidence_Word{Word: &pb.DriverWord{
			ErrorClass:  e.class,
			Code:        evidenceText(e.code),
			Summary:     cutRunes(oneLine(e.Error()), summaryMax),
			Device:      evidenceText(e.device),
			RetryAfterS: max(0, min(e.after, 24*time.Hour)).Seconds(),
		}}})
	case apierrors.APIStatus:
		said := e.Status()
		if 400 <= said.Code && said.Code <= 599 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Http{Http: &pb.HttpAnswer{
				Status:     int64(said.Code),
				Reason:     evidenceText(string(said.Reason)),
				Message:    evidenceText(said.Message),
				Kubernetes: true,
			}}})
		}
	case interface{ GRPCStatus() *status.Status }:
		if said := e.GRPCStatus(); 1 <= said.Code() && said.Code() <= 16 {
			w.add(&pb.Evidence{Kind: &pb.Evidence_Grpc{Grpc: &pb.GrpcStatus{
				Code: int64(said.Code()), Message: evidenceText(said.Message()),
			}}})
		}
	case interface{ NvmlReturn() int }:
		if code := e.NvmlReturn(); 1 <= code && code <= 999 {
			said := &pb.NvmlReturn{Code: int64(code)}
			if named, ok := e.(*nvmlError); ok {
				said.Device = evidenceText(named.device)
			}
			w.add(&pb.Evidence{Kind: &pb.Evidence_Nvml{Nvml: said}})
		}
	}
}

// late adds an innermost error that says that something was not done in time. Others pass on what
// theirs says, and the kernel's has a number.
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
	w.add(&pb.Evidence{Kind: &pb.Evidence_Late{Late: &pb.Late{
		By: by, Operation: at.operation, Text: w.whole,
	}}})
}

func (w *walk) add(evidence *pb.Evidence) { w.found = append(w.found, evidence) }

// typeOf is the type of the innermost error, unless that says nothing.
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

// evidenceText is a text that the agent takes.
func evidenceText(text string) string {
	return cutBytes(strings.ToValidUTF8(text, "\uFFFD"), evidenceMax)
}
