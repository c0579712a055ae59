package drahealth

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "drahealth.example.com/go-driver/drahealthv1"
)

const (
	// reportTimeout is how long it is tried to deliver a report.
	reportTimeout = time.Minute
	// hangTime is for how long an agent that does not answer may just be slow.
	hangTime = 10 * time.Second
	// reportsMax is how many calls of the kubelet are waited with.
	reportsMax = 64
)

// reports is what the agent has not been told yet. One report is under way at a time, so that the
// newest about a claim is also the last that the agent hears of it.
type reports struct {
	mu      sync.Mutex
	waiting []*report
	sending bool
	lost    int64
}

// report is how one call of the kubelet has ended.
type report struct {
	until    time.Time
	step     pb.Step
	outcomes []*pb.PrepareOutcome
	answers  chan map[string]*pb.ClaimAnswer // takes one
}

// Undelivered counts claims of whose end the agent could not be told.
func (c *Client) Undelivered() int64 {
	c.reports.mu.Lock()
	defer c.reports.mu.Unlock()
	return c.reports.lost
}

// report tells the agent how claims ended, in any case, and waits for an answer if there is one to be
// had in time.
func (c *Client) report(
	ctx context.Context, step pb.Step, outcomes []*pb.PrepareOutcome, wait time.Duration,
) map[string]*pb.ClaimAnswer {
	if len(outcomes) == 0 {
		return nil
	}
	failed := slices.ContainsFunc(outcomes, func(o *pb.PrepareOutcome) bool { return o.GetFailed() })
	away := c.absent()
	one := &report{time.Now().Add(reportTimeout), step, outcomes, make(chan map[string]*pb.ClaimAnswer, 1)}
	c.enqueue(one)
	if !failed || away {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case answers := <-one.answers:
		return answers
	case <-timer.C:
		c.doubt(doubtTime)
	case <-ctx.Done():
	}
	return nil
}

// enqueue takes a report. What older ones that wait say of the same claims is no longer so.
func (c *Client) enqueue(one *report) {
	r := &c.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, older := range r.waiting {
		older.outcomes = slices.DeleteFunc(older.outcomes, func(was *pb.PrepareOutcome) bool {
			return slices.ContainsFunc(one.outcomes, func(is *pb.PrepareOutcome) bool {
				return is.GetClaim().GetUid() == was.GetClaim().GetUid()
			})
		})
	}
	r.waiting = append(r.waiting, one)
	if len(r.waiting) > reportsMax {
		r.lost += int64(len(r.waiting[0].outcomes))
		r.waiting = r.waiting[1:]
	}
	if !r.sending {
		r.sending = true
		c.inBackground(c.sendReports)
	}
}

// sendReports ends when there is nothing left to be sent.
func (c *Client) sendReports() {
	r := &c.reports
	for {
		r.mu.Lock()
		if len(r.waiting) == 0 {
			r.sending = false
			r.mu.Unlock()
			return
		}
		one := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.mu.Unlock()
		if !c.send(one) {
			r.mu.Lock()
			r.lost += int64(len(one.outcomes))
			r.mu.Unlock()
		}
	}
}

// send waits for the agent until the report is too old. It says whether the agent has it, or does not
// want it. An agent that ended with it may have kept it, or not: the next one hears it, too.
func (c *Client) send(one *report) bool {
	defer close(one.answers)
	if len(one.outcomes) == 0 {
		return true
	}
	ctx, cancel := context.WithDeadline(c.background, one.until)
	defer cancel()
	request := &pb.ReportPrepareRequest{Step: one.step, Outcomes: one.outcomes}
	began := time.Now()
	reply, err := c.link.ReportPrepare(ctx, request, grpc.WaitForReady(true))
	if status.Code(err) == codes.Unavailable {
		began = time.Now()
		reply, err = c.link.ReportPrepare(ctx, request, grpc.WaitForReady(true))
	}
	switch status.Code(err) {
	case codes.OK:
		c.doubt(0)
		one.answers <- byUID(reply.GetAnswers())
		return true
	case codes.Unimplemented:
		return true
	case codes.Unavailable, codes.Canceled:
	case codes.DeadlineExceeded:
		if time.Since(began) > hangTime { // it had its time, and not what others left of it
			c.disconnect()
		}
	default:
		c.complain(ctx, err, "the drahealth agent does not take a report")
	}
	return false
}
