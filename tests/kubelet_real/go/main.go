// Command kubelet-real runs the kubelet's own plugin watcher, DRA manager with its checkpoints and health streams, and
// event recorder. It has no containers and no pod workers: a test gives each step as a command.
//
// Commands are JSON lines on stdin, each with an id, answered on stdout in any order. What the kubelet does by itself is
// reported on stdout as JSON lines without an id: registrations, updates for pods, and the kubelet's log. The end of stdin
// or SIGTERM cancels the kubelet's context and ends the program at once, as a kubelet ends; SIGKILL is a crash.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

// Logged verbosity: health streams are reported at 4, single files of the plugin directory at 5.
const verbosity = 4

// Lines on stdout, written one at a time.
type output struct {
	mutex sync.Mutex
	lines *json.Encoder
}

func (o *output) write(line any) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if err := o.lines.Encode(line); err != nil {
		os.Exit(1) // the test is gone
	}
}

type fields = map[string]any

// Command of a test. Only the members that the verb needs are set.
type command struct {
	ID  int
	Do  string
	Pod *v1.Pod
	// The pods of the node from now on.
	Pods       []*v1.Pod
	Driver     string
	Pool       string
	Device     string
	Reason     string
	Message    string
	Correlator int
	NowNs      int64
	// The rest is for managers without plugins; 0 is the kubelet's own manager.
	Manager int
	Root    string
	Claims  []state.ClaimInfoState
	Wire    []byte
	Seconds float64
}

// Kubelet without pods of its own.
type kubelet struct {
	out         *output
	manager     *dra.Manager
	recorder    record.EventRecorder
	correlators correlators
	managers    managers

	mutex sync.Mutex
	pods  []*v1.Pod
}

func main() {
	root := flag.String("root", "", "the kubelet's directory")
	node := flag.String("node", "", "name of the node")
	server := flag.String("server", "", "URL of the API server")
	pods := flag.String("pods", "", "UIDs of the pods at the start, separated by commas")
	flag.Parse()
	out := &output{lines: json.NewEncoder(os.Stdout)}
	klog.SetLoggerWithOptions(logr.New(&logSink{out: out}), klog.ContextualLogger(true))
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	k := &kubelet{out: out, pods: podsOf(*pods)}
	err := k.start(ctx, *root, *node, *server)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	out.write(fields{"event": "started"})
	go k.serve(ctx, cancel)
	<-ctx.Done()
}

// Start all parts in the order of the kubelet's own start.
func (k *kubelet) start(ctx context.Context, root, node, server string) error {
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host: server, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	})
	if err != nil {
		return err
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	k.recorder = broadcaster.NewRecorder(scheme.Scheme, v1.EventSource{Component: "kubelet", Host: node})
	broadcaster.StartRecordingToSink(&typedv1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	k.manager, err = dra.NewManager(klog.FromContext(ctx), client, root)
	if err != nil {
		return err
	}
	getNode := func(context.Context) (*v1.Node, error) {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, nil
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := k.manager.Start(ctx, k.activePods, getNode, ready); err != nil {
		return err
	}
	go k.forwardUpdates()
	plugins := pluginmanager.NewPluginManager(filepath.Join(root, "plugins_registry"), k.recorder)
	plugins.AddHandler(registration.DRAPlugin, &handler{PluginHandler: k.manager.GetWatcherHandler(), out: k.out})
	go plugins.Run(ctx, ready, ctx.Done())
	return nil
}

func podsOf(uids string) []*v1.Pod {
	pods := []*v1.Pod{}
	for _, uid := range strings.Split(uids, ",") {
		pods = append(pods, &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}})
	}
	return pods
}

func (k *kubelet) activePods() []*v1.Pod {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return k.pods
}

// Report the pods whose devices changed, with the instant of their arrival.
func (k *kubelet) forwardUpdates() {
	for update := range k.manager.Updates() {
		k.out.write(fields{"event": "update", "pods": update.PodUIDs, "at_ns": monotonic()})
	}
}

func (k *kubelet) serve(ctx context.Context, cancel context.CancelFunc) {
	defer cancel()
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var given command
		if err := json.Unmarshal(line, &given); err != nil {
			fmt.Fprintln(os.Stderr, "invalid command:", err)
			return
		}
		if given.Pods != nil {
			k.mutex.Lock()
			k.pods = given.Pods
			k.mutex.Unlock()
		}
		go k.run(ctx, given)
	}
}

func (k *kubelet) run(ctx context.Context, given command) {
	answer := fields{"id": given.ID}
	var err error
	if given.Manager != 0 {
		answer["result"], err = k.managers.run(ctx, given)
		k.answer(answer, err)
		return
	}
	switch given.Do {
	case "prepare":
		err = k.manager.PrepareResources(ctx, given.Pod)
	case "unprepare":
		err = k.manager.UnprepareResources(ctx, given.Pod)
	case "status":
		answer["result"] = containerStatuses(ctx, k.manager, given.Pod)
	case "claims":
		answer["result"], err = claims(k.manager, given.Pod)
	case "health":
		answer["result"] = health(k.manager, given.Driver, given.Pool, given.Device)
	case "event":
		reference := &v1.ObjectReference{
			Kind: "Pod", APIVersion: "v1", Namespace: given.Pod.Namespace, Name: given.Pod.Name, UID: given.Pod.UID,
		}
		k.recorder.Event(reference, v1.EventTypeWarning, given.Reason, given.Message)
	case "correlate":
		answer["result"], err = k.correlators.correlate(given)
	default:
		err = fmt.Errorf("%s: unknown command", given.Do)
	}
	k.answer(answer, err)
}

func (k *kubelet) answer(answer fields, err error) {
	if err != nil {
		answer["error"] = err.Error()
	}
	k.out.write(answer)
}

// Return the container statuses that the kubelet would write for a pod whose containers run.
func containerStatuses(ctx context.Context, manager *dra.Manager, pod *v1.Pod) []v1.ContainerStatus {
	status := v1.PodStatus{}
	for i := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, v1.ContainerStatus{Name: pod.Spec.Containers[i].Name})
	}
	updateStatus(klog.FromContext(ctx), manager, pod, &status)
	return status.ContainerStatuses
}

// Return the time on the clock that Python's time.monotonic_ns() reads.
func monotonic() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err) // every Linux has this clock
	}
	return now.Nano()
}
