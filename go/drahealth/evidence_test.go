// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	pb "drahealth.example.com/go/drahealthv1"
)

func pathError(path string) error {
	return &fs.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
}

// shown formats each piece of evidence as a short line.
func shown(err error) (all []string) {
	for _, piece := range evidenceOf(err) {
		switch kind := piece.GetKind().(type) {
		case *pb.Evidence_Errno:
			e := kind.Errno
			all = append(all, fmt.Sprintf("errno %d %d %s", e.GetNumber(), e.GetOperation(), e.GetPath()))
		case *pb.Evidence_DriverError:
			w := kind.DriverError
			all = append(all, fmt.Sprintf("word %d %s %q %s %v", w.GetErrorClass(), w.GetCode(), w.GetSummary(), w.GetDevice(), w.GetRetryAfterS()))
			if len(w.GetRequests()) > 0 {
				all = append(all, fmt.Sprintf("of %q", w.GetRequests()))
			}
		case *pb.Evidence_Timeout:
			all = append(all, fmt.Sprintf("late %s %d", kind.Timeout.GetBy(), kind.Timeout.GetOperation()))
		case *pb.Evidence_Grpc:
			all = append(all, fmt.Sprintf("grpc %d %s", kind.Grpc.GetCode(), kind.Grpc.GetMessage()))
		case *pb.Evidence_Http:
			h := kind.Http
			all = append(all, fmt.Sprintf("http %d %s %t", h.GetStatus(), h.GetReason(), h.GetKubernetes()))
		case *pb.Evidence_Nvml:
			all = append(all, fmt.Sprintf("nvml %d %s", kind.Nvml.GetCode(), kind.Nvml.GetDevice()))
		case *pb.Evidence_DecodeError:
			all = append(all, fmt.Sprintf("decode_error %s", kind.DecodeError.GetBy()))
			if requests := kind.DecodeError.GetRequests(); len(requests) > 0 {
				all = append(all, fmt.Sprintf("of %q", requests))
			}
		case *pb.Evidence_OperationFailure:
			failure := kind.OperationFailure
			all = append(all, fmt.Sprintf("failure %s %d", failure.GetBy(), failure.GetOperation()))
			if failure.GetText() != err.Error() {
				all = append(all, failure.GetText())
			}
		case *pb.Evidence_Text:
			all = append(all, "text")
		}
	}
	return all
}

func TestEvidenceOfEachKindOfError(t *testing.T) {
	number := json.Unmarshal([]byte(`{"pages": "many"}`), &struct{ Pages int }{})
	claims := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	read, write, _ := os.Pipe()
	defer read.Close()
	defer write.Close()
	_ = read.SetReadDeadline(time.Unix(1, 0))
	_, late := read.Read(make([]byte, 1))

	for _, test := range []struct {
		err  error
		want string
	}{
		{errors.New("bank is locked"), "text"},
		{syscall.EBUSY, "errno 16 0 ; text"},
		{fmt.Errorf("claim: %w", Doing(OpCDI, pathError("/cdi/a.json"))), "errno 28 2 /cdi/a.json; text"},
		{Doing(OpCDI, Doing(OpState, pathError("/ledger"))), "errno 28 3 /ledger; text"},
		{&os.LinkError{Op: "rename", Old: "/cdi/.a", New: "/cdi/a", Err: syscall.EROFS}, "errno 30 0 /cdi/a; text"},
		{Doing(OpAPI, refused), "errno 111 5 ; text"},
		{errors.Join(pathError("/a"), pathError("/b")), "errno 28 0 /a; errno 28 0 /b; text"},
		{fmt.Errorf("%w, %w", syscall.EIO, context.DeadlineExceeded), "errno 5 0 ; late context.DeadlineExceeded 0; text"},
		{Doing(OpLock, context.DeadlineExceeded), "late context.DeadlineExceeded 6; text"},
		{Doing(OpDevice, late), "late os.ErrDeadlineExceeded 1; text"},
		{&net.DNSError{Err: "no answer", IsTimeout: true}, "late net.DNSError 0; text"},
		{syscall.ETIMEDOUT, "errno 110 0 ; text"},
		{context.Canceled, "text"},
		{fmt.Errorf("x: %w", status.Error(codes.Unavailable, "closing")), "grpc 14 closing; text"},
		{apierrors.NewConflict(claims, "it", errors.New("changed")), "http 409 Conflict true; text"},
		{fmt.Errorf("get: %w", apierrors.NewNotFound(claims, "it")), "http 404 NotFound true; text"},
		{fmt.Errorf("handle: %w", NVMLReturn(15, "gpu-3", errors.New("GPU is lost"))), "nvml 15 gpu-3; text"},
		{NVMLReturn(999, "", nil), "nvml 999 ; text"},
		{NVMLReturn(0, "gpu-3", errors.New("it went well")), "text"},
		{number, "text"},
		{Doing(OpConfig, number), "decode_error json.UnmarshalTypeError; text"},
		{Doing(OpConfig, errors.New("strict decoding error")), "decode_error decoder; text"},
		{Doing(OpState, fmt.Errorf("/ledger: %w", number)), "failure json.UnmarshalTypeError 3; text"},
		{Doing(OpState, fmt.Errorf("%w, %w", errors.New("no ledger"), number)), "failure json.UnmarshalTypeError 3; text"},
		{Doing(OpAPI, &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}), "failure x509.UnknownAuthorityError 5; text"},
		{Doing(OpAPI, &net.DNSError{Err: "no such host", Name: "api"}), "failure net.DNSError 5; text"},
		{&net.DNSError{Err: "no such host", Name: "api"}, "text"},
		{Doing(OpState, errors.New("no ledger")), "text"},
		{Doing(OpState, pathError("/ledger")), "errno 28 3 /ledger; text"},
		{Doing(OpConfig, Doing(OpState, number)), "failure json.UnmarshalTypeError 3; text"},
		{Doing(OpConfig, BadConfig("fpga.mode", "mode 9, 0 to 3")), `word 2 fpga.mode "mode 9, 0 to 3"  0; text`},
		{Doing(OpConfig, pathError("/etc/x")), "errno 28 4 /etc/x; text"},
		{Transient("fpga.training", "link trains").After(90 * time.Second), `word 1 fpga.training "link trains"  90; text`},
		{FailedDevice("fpga-0", "fpga.dead", "no answer: %w", syscall.EIO), `word 3 fpga.dead "no answer: input/output error" fpga-0 0; errno 5 0 ; text`},
		{ForRequests(BadConfig("fpga.mode", "mode 9"), "a", "b/c"), `word 2 fpga.mode "mode 9"  0; of ["a" "b/c"]; text`},
		{ForRequests(Doing(OpConfig, number), "a"), `decode_error json.UnmarshalTypeError; of ["a"]; text`},
		{Doing(OpConfig, ForRequests(number, "a")), `decode_error json.UnmarshalTypeError; of ["a"]; text`},
		{ForRequests(ForRequests(BadConfig("fpga.mode", "mode 9"), "a"), "b"), `word 2 fpga.mode "mode 9"  0; of ["a"]; text`},
		{ForRequests(BadConfig("fpga.mode", "mode 9"), "", "A b", "a/b/c"), `word 2 fpga.mode "mode 9"  0; text`},
		{ForRequests(syscall.EBUSY, "a"), "errno 16 0 ; text"},
		{Permanent("fpga.firmware", "%w and %w", syscall.EIO, syscall.EBUSY), `word 4 fpga.firmware "input/output error and device or resource busy"  0; errno 5 0 ; errno 16 0 ; text`},
	} {
		if got := strings.Join(shown(test.err), "; "); got != test.want {
			t.Errorf("%v\n  shows %s\n  not   %s", test.err, got, test.want)
		}
	}
}

func TestClassifiedErrorDoesNotChange(t *testing.T) {
	training := Transient("fpga.training", "link trains")
	later := training.After(time.Minute).After(90 * time.Second)
	if got := shown(training)[0]; got != `word 1 fpga.training "link trains"  0` {
		t.Errorf("After changed the error to %s", got)
	}
	if got := shown(later)[0]; got != `word 1 fpga.training "link trains"  90` {
		t.Error(got)
	}
	if !errors.Is(later, training) || errors.Is(training, later) || errors.Is(later, Transient("fpga.training", "link trains")) {
		t.Error("the copy is another error for errors.Is")
	}
}

func TestEvidenceLinesHaveAllValues(t *testing.T) {
	for _, test := range []struct {
		err  error
		want string
	}{
		{Doing(OpCDI, pathError("/cdi/a.json")), `errno number=28 operation=cdi path="/cdi/a.json"`},
		{syscall.EBUSY, `errno number=16 operation=unspecified`},
		{FailedDevice("gpu-3", "gpu.link", "link %d is down", 2), `driver-error class=failed-device code=gpu.link device=gpu-3 summary="link 2 is down"`},
		{Transient("gpu.training", "links train").After(time.Minute), `driver-error class=transient code=gpu.training retry-after=60s summary="links train"`},
		{NVMLReturn(15, "gpu-3", nil), "nvml code=15 device=gpu-3"},
		{status.Error(codes.Unavailable, "closing"), `grpc code=Unavailable message="closing"`},
		{apierrors.NewUnauthorized("no token"), "http status=401 reason=Unauthorized"},
		{Doing(OpLock, context.DeadlineExceeded), "timeout by=context.DeadlineExceeded operation=lock"},
		{Doing(OpConfig, errors.New("no JSON")), `decode-error by=decoder text="no JSON"`},
		{ForRequests(BadConfig("gpu.mode", "mode 9"), "a", "b"), `driver-error class=bad-config code=gpu.mode request=a,b summary="mode 9"`},
		{ForRequests(Doing(OpConfig, errors.New("no JSON")), "a"), `decode-error by=decoder request=a text="no JSON"`},
		{Doing(OpAPI, x509.UnknownAuthorityError{}), `operation-failure by=x509.UnknownAuthorityError operation=api`},
		{errors.New("bank is locked"), `text "bank is locked"`},
	} {
		if got := Evidence(test.err)[0]; got != test.want {
			t.Errorf("%v\n  shows %s\n  not   %s", test.err, got, test.want)
		}
	}
}

func TestEvidenceOfNilIsEmpty(t *testing.T) {
	if evidenceOf(nil) != nil || Doing(OpCDI, nil) != nil || ForRequests(nil, "a") != nil {
		t.Error("the error nil has evidence")
	}
}

func TestEvidenceIsWithinTheAgentsLimits(t *testing.T) {
	var many []error
	for range 30 {
		many = append(many, pathError("/"+strings.Repeat("\u00fc", 5000)))
	}
	evidence := evidenceOf(errors.Join(many...))
	if len(evidence) != evidenceCount || evidence[evidenceCount-1].GetText() == "" {
		t.Errorf("%d pieces, the last is %v", len(evidence), evidence[len(evidence)-1])
	}
	for _, piece := range evidence {
		for _, text := range []string{piece.GetErrno().GetPath(), piece.GetErrno().GetText(), piece.GetText()} {
			if len(text) > evidenceMax || !utf8.ValidString(text) {
				t.Errorf("the text has %d bytes", len(text))
			}
		}
	}
	summary := evidenceOf(BadConfig("x.y", "%s", "\xff\n"+strings.Repeat("\u00fc", 300)))[0].GetDriverError().GetSummary()
	if utf8.RuneCountInString(summary) != summaryMax || !utf8.ValidString(summary) || strings.Contains(summary, "\n") {
		t.Errorf("unexpected summary: %q", summary)
	}
}

// endless is an error that wraps itself.
type endless struct{}

func (endless) Error() string   { return "endless" }
func (e endless) Unwrap() error { return e }

func TestEvidenceOfEndlessChainEnds(t *testing.T) {
	for want, err := range map[string]error{"text": endless{}, "decode_error drahealth.endless; text": Doing(OpConfig, endless{})} {
		if got := strings.Join(shown(err), "; "); got != want {
			t.Errorf("shows %s, not %s", got, want)
		}
	}
}
