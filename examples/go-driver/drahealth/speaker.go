package drahealth

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// noAnswer is what each device's message begins with while the agent is away.
	noAnswer = "drahealth agent does not answer: "
	// firstAnswer is how long a first list may take before devices are Unknown: the agent may take
	// two seconds to look at what was declared.
	firstAnswer = 3 * time.Second
	// repeatMax is how often it is said again that a device is Unknown.
	repeatMax = 10 * time.Second
	// wholeList is how long all messages of one list may take to come.
	wholeList = time.Second
	// defaultLease is the kubelet's, of a device that names none.
	defaultLease = 30 * time.Second
)

type device struct{ pool, name string }

// speaker decides what the kubelet is told, and when. It reads no clock and talks to nobody.
//
// The agent tells of each device three times within its lease, so one that says nothing for half of
// the smallest lease has stopped, however open its stream is. Then every device that is known is
// Unknown. That is repeated as long as it lasts, since it needs no reading: with a lease that runs
// out at the kubelet goes the reason, and the kubelet's helper calls HandleError when it hears
// nothing for a lease.
//
// An agent of which only the part that serves still works would hand its last list to every new
// stream, as if it were news. So after a silence a first list, of however many messages, is kept back
// until a later one shows that the agent lives.
type speaker struct {
	outage  string                   // why devices are Unknown; empty while the agent answers
	leases  map[device]time.Duration // of every device that was ever told of
	began   time.Time                // when the first list of this stream came
	lease   time.Duration            // the smallest on this stream; 0: there was no list yet
	quiet   time.Time                // since when the agent says nothing
	again   time.Time                // when to repeat that devices are Unknown
	doubted bool                     // the agent was silent, and has not shown yet that it lives
	kept    [][]kubeletplugin.DeviceHealth
}

func newSpeaker(now time.Time) *speaker {
	return &speaker{leases: map[device]time.Duration{}, quiet: now}
}

// silent is from when on the agent has been silent for too long.
func (s *speaker) silent() time.Time {
	if s.outage == "" && s.lease == 0 {
		return s.quiet.Add(firstAnswer)
	}
	return s.quiet.Add(cmp.Or(s.lease, defaultLease) / 2)
}

// due is when to call waited unless something happens before.
func (s *speaker) due() time.Time {
	if s.outage != "" && s.again.Before(s.silent()) {
		return s.again
	}
	return s.silent()
}

// heard takes a list of the agent. It returns the lists to be passed on, as all of these methods do.
func (s *speaker) heard(got list, now time.Time) [][]kubeletplugin.DeviceHealth {
	if got.first {
		s.began, s.lease = now, 0
	}
	for _, told := range got.devices {
		s.leases[device{told.PoolName, told.DeviceName}] = told.HealthCheckTimeout
		s.lease = smaller(s.lease, told.HealthCheckTimeout)
	}
	s.quiet = now
	said := append(s.kept, got.devices)
	if s.doubted && now.Sub(s.began) < wholeList {
		s.kept = said
		return nil
	}
	s.outage, s.doubted, s.kept = "", false, nil
	return said
}

// lost takes the end of a stream. During an outage that is no news, and the first reason stays.
func (s *speaker) lost(reason string, said *declaration, now time.Time) [][]kubeletplugin.DeviceHealth {
	s.quiet, s.kept = now, nil
	if s.outage != "" {
		return nil
	}
	s.outage = reason
	return s.unknown(said, now)
}

// waited is for when nothing happened until due. It says, too, whether the agent hangs, and should be
// left.
func (s *speaker) waited(said *declaration, now time.Time) (_ [][]kubeletplugin.DeviceHealth, hangs bool) {
	if !now.Before(s.silent()) {
		s.quiet = now
		switch {
		case said != nil && len(said.devices) == 0: // what should it tell of?
		case s.outage != "":
			hangs = true
		case s.lease == 0:
			s.outage = noAnswer + "nothing came from it yet"
		default:
			s.outage, s.doubted, hangs = noAnswer+"it is silent", true, true
		}
	}
	if s.outage == "" {
		return nil, false
	}
	return s.unknown(said, now), hangs
}

// busy notes for how long the kubelet took nothing: nobody listened to the agent meanwhile.
func (s *speaker) busy(time time.Duration) { s.quiet = s.quiet.Add(time) }

// unknown is every device of which the kubelet may believe something.
func (s *speaker) unknown(said *declaration, now time.Time) [][]kubeletplugin.DeviceHealth {
	if said != nil {
		for _, one := range said.devices {
			key := device{one.GetPool(), one.GetName()}
			if _, told := s.leases[key]; !told && key.pool != "" {
				s.leases[key] = seconds(one.GetLeaseS())
			}
		}
	}
	pause := repeatMax
	var devices []kubeletplugin.DeviceHealth
	for key, lease := range s.leases {
		pause = min(pause, cmp.Or(lease, defaultLease)/3)
		devices = append(devices, kubeletplugin.DeviceHealth{
			PoolName:           key.pool,
			DeviceName:         key.name,
			Health:             kubeletplugin.HealthStatusUnknown,
			LastUpdated:        now,
			HealthCheckTimeout: lease,
			Message:            s.outage,
		})
	}
	s.again = now.Add(pause)
	if devices == nil {
		return nil
	}
	slices.SortFunc(devices, func(a, b kubeletplugin.DeviceHealth) int {
		return cmp.Or(cmp.Compare(a.PoolName, b.PoolName), cmp.Compare(a.DeviceName, b.DeviceName))
	})
	return [][]kubeletplugin.DeviceHealth{devices}
}

// smaller of two leases, of which the first may not be known yet.
func smaller(known, told time.Duration) time.Duration {
	told = cmp.Or(told, defaultLease)
	return min(cmp.Or(known, told), told)
}
