// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "drahealth.example.com/go/drahealthv1"
)

const (
	// reportTimeout limits the time for which the delivery of a report is tried.
	reportTimeout = time.Minute
	// hangTime is how long an agent may take to answer before it counts as hung.
	hangTime = 10 * time.Second
	// reportsMax limits the number of queued reports.
	reportsMax = 64
)

// reports is the queue of undelivered reports. They are sent one at a time, so that the agent gets the
// newest report about a claim last.
type reports struct {
	mu      sync.Mutex
	waiting []*report
	sent    chan struct{} // closed when all reports are sent; nil: none is to be sent
	lost    int64
}

// wait waits until all reports are sent, or until a time limit.
func (r *reports) wait(limit time.Duration) {
	r.mu.Lock()
	sent := r.sent
	r.mu.Unlock()
	if sent == nil {
		return
	}
	select {
	case <-sent:
	case <-time.After(limit):
	}
}

// report has the results of one call of the kubelet.
type report struct {
	until    time.Time
	step     pb.Step
	outcomes []*pb.PrepareOutcome
	blocked  []string                        // UIDs of claims of the call that were not tried
	answers  chan map[string]*pb.ClaimAnswer // capacity 1
}

// Undelivered returns the number of claims whose results could not be delivered to the agent.
func (c *Client) Undelivered() int64 {
	c.reports.mu.Lock()
	defer c.reports.mu.Unlock()
	return c.reports.lost
}

// report queues the results of claims for the agent. If a claim failed and the agent is not known to be
// absent, it waits for the answer.
func (c *Client) report(
	ctx context.Context, step pb.Step, outcomes []*pb.PrepareOutcome, blocked []string, wait time.Duration,
) map[string]*pb.ClaimAnswer {
	if len(outcomes) == 0 {
		return nil
	}
	failed := slices.ContainsFunc(outcomes, func(o *pb.PrepareOutcome) bool { return o.GetFailed() })
	away := c.absent()
	batch := &report{time.Now().Add(reportTimeout), step, outcomes, blocked, make(chan map[string]*pb.ClaimAnswer, 1)}
	c.enqueue(batch)
	if !failed || away {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case answers := <-batch.answers:
		return answers
	case <-timer.C:
		c.doubt(doubtTime)
	case <-ctx.Done():
	}
	return nil
}

// enqueue queues a report and removes older results of the same step and claims from the queue. Results of
// the other step stay: the agent remembers a failed prepare until its claim is prepared again.
func (c *Client) enqueue(batch *report) {
	r := &c.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, older := range r.waiting {
		if older.step != batch.step {
			continue
		}
		older.outcomes = slices.DeleteFunc(older.outcomes, func(was *pb.PrepareOutcome) bool {
			return slices.ContainsFunc(batch.outcomes, func(is *pb.PrepareOutcome) bool {
				return is.GetClaim().GetUid() == was.GetClaim().GetUid()
			})
		})
	}
	r.waiting = append(r.waiting, batch)
	if len(r.waiting) > reportsMax {
		r.lost += int64(len(r.waiting[0].outcomes))
		r.waiting = r.waiting[1:]
	}
	if r.sent == nil {
		r.sent = make(chan struct{})
		c.inBackground(c.sendReports)
	}
}

// sendReports sends the queued reports, then returns.
func (c *Client) sendReports() {
	r := &c.reports
	for {
		r.mu.Lock()
		if len(r.waiting) == 0 {
			close(r.sent)
			r.sent = nil
			r.mu.Unlock()
			return
		}
		batch := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.mu.Unlock()
		if !c.send(batch) {
			r.mu.Lock()
			r.lost += int64(len(batch.outcomes))
			r.mu.Unlock()
		}
	}
}

// send delivers a report before it expires. It returns true if the agent has accepted the report or
// does not support reports. If the agent stops during the call, the report is sent again to the next
// agent, because the first may not have stored it.
func (c *Client) send(batch *report) bool {
	defer close(batch.answers)
	if len(batch.outcomes) == 0 {
		return true
	}
	ctx, cancel := context.WithDeadline(c.background, batch.until)
	defer cancel()
	request := &pb.ReportPrepareRequest{Step: batch.step, Outcomes: batch.outcomes, BlockedUids: batch.blocked}
	began := time.Now()
	reply, err := c.link.ReportPrepare(ctx, request, grpc.WaitForReady(true))
	if status.Code(err) == codes.Unavailable {
		began = time.Now()
		reply, err = c.link.ReportPrepare(ctx, request, grpc.WaitForReady(true))
	}
	switch status.Code(err) {
	case codes.OK:
		c.doubt(0)
		batch.answers <- byUID(reply.GetAnswers())
		return true
	case codes.Unimplemented:
		return true
	case codes.Unavailable, codes.Canceled:
	case codes.DeadlineExceeded:
		if time.Since(began) > hangTime { // the call had enough time of its own
			c.disconnect()
		}
	default:
		c.complain(ctx, err, "the drahealth agent refused a report")
	}
	return false
}
