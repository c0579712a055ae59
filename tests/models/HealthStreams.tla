--------------------------- MODULE HealthStreams ---------------------------
(* Health of one device on its way from two instances of a driver to a pod's status.

   The kubelet has one stream to each registered instance and one cache for the driver. An entry's lease counts
   from its receipt. The cache's reader finds the end of a lease, but pods are only synced when a message changes
   an entry, and by a resync at any time. The end of a stream deletes the entry. A crash of the kubelet keeps it.

   The constants choose the kubelet's behaviour (FixedAuthority, FixedExpiry) and the orders of messages that an
   instance keeps (the other Booleans). test_health_streams.py runs the combinations. *)
EXTENDS Naturals

CONSTANTS
    Lease,            \* time for which an entry is valid, after its receipt
    Horizon,          \* largest time
    KubeletApi,       \* version of the health API that the kubelet calls
    FixedAuthority,   \* the kubelet takes health from the newest instance alone (pull request 140842)
    FixedExpiry,      \* the kubelet syncs pods at the end of a lease (pull request 140883)
    OnlyNewestSends,  \* an older instance keeps its stream open and sends nothing
    RepeatsAfterEnd,  \* the other instance sends all devices again when one has ended
    SendsUnknown,     \* a device whose sources stall is sent as Unknown, not left to its lease
    SaltsLease,       \* the first list after a pause, and of a new stream, has another lease
    SaltsUnused,      \* the lease of a new stream changes, too, if the stream before has sent no list
    ServesBoth,       \* instances serve v1 and v1alpha1; else v1 alone
    MayHang           \* an instance can stop for any time with its stream open

Instances == {1, 2}
NoEntry == [health |-> "none", salt |-> 0, at |-> 0]
Never == [health |-> "none", at |-> 0]

VARIABLES
    now,
    truth,      \* health of the hardware
    stalled,    \* the sources of the device hang
    state,      \* of each instance: absent, running or ended
    stream,     \* the kubelet has a health stream to the instance
    hung,
    reading,    \* last reading of each instance
    last,       \* last verdict that each instance has sent on its stream
    evaluated,  \* time of the last evaluation of each instance
    salt,       \* 0 or 1, added to the leases: the other number after evaluations paused for a lease
    extra,      \* 0 or 2, added to the leases of a stream: the other number than on the stream before
    used,       \* each instance has sent a list on its last stream
    repeat,     \* an instance must send again before time passes
    kubelet,    \* the kubelet runs
    cache,
    pod         \* health in the pod's status

vars == <<now, truth, stalled, state, stream, hung, reading, last, evaluated, salt, extra, used, repeat, kubelet, cache, pod>>

Newest == IF state[2] = "running" THEN 2 ELSE 1
IsExpired(entry) == now - entry.at > Lease
Read == IF cache = NoEntry \/ IsExpired(cache) THEN "Unknown" ELSE cache.health
CanStream == ServesBoth \/ KubeletApi = "v1"
Verdict(i) == IF stalled THEN "Unknown" ELSE reading[i]

Init ==
    /\ now = 0 /\ truth = "Healthy" /\ stalled = FALSE
    /\ state = [i \in Instances |-> IF i = 1 THEN "running" ELSE "absent"]
    /\ stream = [i \in Instances |-> i = 1 /\ CanStream]
    /\ hung = [i \in Instances |-> FALSE]
    /\ reading = [i \in Instances |-> "Healthy"]
    /\ last = [i \in Instances |-> Never]
    /\ evaluated = [i \in Instances |-> 0]
    /\ salt = [i \in Instances |-> 0]
    /\ extra = [i \in Instances |-> 0]
    /\ used = [i \in Instances |-> FALSE]
    /\ repeat = FALSE /\ kubelet = TRUE /\ cache = NoEntry /\ pod = "Unknown"

(* --- hardware and instances --- *)

MaySend(i) ==
    /\ stream[i] /\ ~hung[i]
    /\ OnlyNewestSends => i = Newest
    /\ stalled => SendsUnknown

HasSent(i) == last[i] # Never /\ last[i].at = now

(* An instance that runs sends at every tick what it may send, unless it hangs. *)
IsPunctual == \A i \in Instances : MaySend(i) /\ i = Newest => HasSent(i)

Break ==
    /\ truth = "Healthy" /\ truth' = "Unhealthy"
    /\ UNCHANGED <<now, stalled, state, stream, hung, reading, last, evaluated, salt, extra, used, repeat, kubelet, cache, pod>>

Stall ==
    /\ ~stalled /\ stalled' = TRUE
    /\ UNCHANGED <<now, truth, state, stream, hung, reading, last, evaluated, salt, extra, used, repeat, kubelet, cache, pod>>

Verify(i) ==
    /\ state[i] = "running" /\ ~hung[i] /\ ~stalled /\ reading[i] # truth
    /\ reading' = [reading EXCEPT ![i] = truth]
    /\ UNCHANGED <<now, truth, stalled, state, stream, hung, last, evaluated, salt, extra, used, repeat, kubelet, cache, pod>>

(* Assumption: an instance that continues sends a list before it hangs again. *)
Hang(i) ==
    /\ MayHang /\ state[i] = "running" /\ ~hung[i] /\ IsPunctual
    /\ hung' = [hung EXCEPT ![i] = TRUE]
    /\ UNCHANGED <<now, truth, stalled, state, stream, reading, last, evaluated, salt, extra, used, repeat,
                   kubelet, cache, pod>>

Resume(i) ==
    /\ hung[i] /\ hung' = [hung EXCEPT ![i] = FALSE]
    /\ evaluated' = [evaluated EXCEPT ![i] = now]
    /\ salt' = [salt EXCEPT ![i] = IF SaltsLease /\ now - evaluated[i] > Lease THEN 1 - @ ELSE @]
    /\ UNCHANGED <<now, truth, stalled, state, stream, reading, last, extra, used, repeat, kubelet, cache, pod>>

Start ==
    /\ state[2] = "absent" /\ kubelet
    /\ state' = [state EXCEPT ![2] = "running"]
    /\ stream' = [stream EXCEPT ![2] = CanStream]
    /\ reading' = [reading EXCEPT ![2] = truth]
    /\ evaluated' = [evaluated EXCEPT ![2] = now]
    /\ UNCHANGED <<now, truth, stalled, hung, last, salt, extra, used, repeat, kubelet, cache, pod>>

End ==
    /\ state[2] = "running" /\ state[1] = "running"
    /\ state' = [state EXCEPT ![1] = "ended"]
    /\ stream' = [stream EXCEPT ![1] = FALSE]
    /\ hung' = [hung EXCEPT ![1] = FALSE]
    /\ cache' = IF stream[1] /\ ~FixedAuthority THEN NoEntry ELSE cache
    /\ repeat' = (RepeatsAfterEnd /\ stream[2])
    /\ UNCHANGED <<now, truth, stalled, reading, last, evaluated, salt, extra, used, kubelet, pod>>

Send(i) ==
    /\ MaySend(i)
    /\ LET s == salt[i] + extra[i] + (IF SaltsLease THEN 4 * (i - 1) ELSE 0)  \* each run has its own, too
           h == Verdict(i)
           isTaken == ~FixedAuthority \/ i = Newest
           isChange == cache = NoEntry \/ cache.health # h \/ cache.salt # s
       IN /\ last' = [last EXCEPT ![i] = [health |-> h, at |-> now]]
          /\ cache' = IF isTaken THEN [health |-> h, salt |-> s, at |-> now] ELSE cache
          /\ pod' = IF isTaken /\ isChange THEN h ELSE pod
    /\ used' = [used EXCEPT ![i] = TRUE]
    /\ repeat' = (repeat /\ i # Newest)
    /\ UNCHANGED <<now, truth, stalled, state, stream, hung, reading, evaluated, salt, extra, kubelet>>

(* --- the kubelet --- *)

Resync ==
    /\ kubelet /\ pod # Read /\ pod' = Read
    /\ UNCHANGED <<now, truth, stalled, state, stream, hung, reading, last, evaluated, salt, extra, used, repeat, kubelet, cache>>

Crash ==
    /\ kubelet /\ kubelet' = FALSE
    /\ stream' = [i \in Instances |-> FALSE]
    /\ last' = [i \in Instances |-> Never]
    /\ repeat' = FALSE
    /\ UNCHANGED <<now, truth, stalled, state, hung, reading, evaluated, salt, extra, used, cache, pod>>

Restart ==
    /\ ~kubelet /\ kubelet' = TRUE
    /\ stream' = [i \in Instances |-> state[i] = "running" /\ CanStream]
    /\ extra' = [i \in Instances |->
                   IF SaltsLease /\ (used[i] \/ SaltsUnused) THEN 2 - extra[i] ELSE extra[i]]
    /\ used' = [i \in Instances |-> FALSE]
    /\ pod' = Read
    /\ UNCHANGED <<now, truth, stalled, state, hung, reading, last, evaluated, salt, repeat, cache>>

Tick ==
    /\ now < Horizon /\ ~repeat /\ IsPunctual
    /\ now' = now + 1
    /\ pod' = IF FixedExpiry /\ cache # NoEntry /\ now + 1 - cache.at > Lease THEN "Unknown" ELSE pod
    /\ evaluated' = [i \in Instances |-> IF hung[i] THEN evaluated[i] ELSE now + 1]
    /\ UNCHANGED <<truth, stalled, state, stream, hung, reading, last, salt, extra, used, repeat, kubelet, cache>>

Next ==
    \/ Break \/ Stall \/ Start \/ End \/ Resync \/ Crash \/ Restart \/ Tick
    \/ \E i \in Instances : Verify(i) \/ Hang(i) \/ Resume(i) \/ Send(i)

Spec == Init /\ [][Next]_vars

(* --- what must hold --- *)

(* Pods get the verdict that the newest instance sent last (issue 140818). *)
Authority ==
    LET i == Newest
    IN (kubelet /\ stream[i] /\ last[i] # Never /\ ~repeat /\ now - last[i].at <= Lease)
       => Read = last[i].health

(* No pod shows a verdict whose lease has ended (issue 140819). *)
Expiry == (kubelet /\ cache # NoEntry /\ IsExpired(cache)) => pod = "Unknown"

(* A pod shows an entry that is valid and was sent on the present stream. *)
Refresh ==
    (kubelet /\ ~repeat /\ cache # NoEntry /\ ~IsExpired(cache) /\ last[Newest] # Never
        /\ last[Newest].at = cache.at) => pod = cache.health

(* The kubelet has a stream to the newest instance. *)
Reachable == kubelet => stream[Newest]
=============================================================================
