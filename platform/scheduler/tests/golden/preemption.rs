//! Which pods are deleted for another one.

use crate::script::check;

#[test]
fn preemption_deletes_the_fewest_pods_of_the_lowest_priority() {
    check(
        "node a cpu=4 memory=8Gi
         node b cpu=4 memory=8Gi
         pod a1 cpu=2 priority=1 select:none=
         pod low1 cpu=2 priority=1
         pod low2 cpu=2 priority=2
         pod low3 cpu=2 priority=3
         pod low4 cpu=2 priority=4
         gone a1
         decide
         pod big cpu=4 priority=10
         decide
         preempt big
         pod small cpu=2 priority=5
         preempt small
         pod never cpu=5 priority=10
         preempt never",
        // The pods are placed by priority: low4 -> a, low3 -> b, low2 -> a or b.
        "low4 -> a
         low3 -> b
         low2 -> a
         low1 -> b
         big: 0/2 nodes are available: 2 Insufficient cpu.
         big preempts low3 low1 on b
         small preempts low2 on a
         never: Impossible { unhelpful: 0, without_victims: 2 }",
    );
}

#[test]
fn preemption_prefers_pods_that_no_budget_protects() {
    check(
        "node a cpu=4 memory=8Gi
         pod guarded cpu=2 label:app=guarded priority=1
         pod free cpu=2 priority=2
         decide
         budget app=guarded<0
         pod big cpu=2 priority=10
         preempt big",
        "free -> a
         guarded -> a
         big preempts free on a",
    );
}

#[test]
fn the_room_of_victims_is_kept_for_the_pod_that_preempted_them() {
    check(
        "node a cpu=2 memory=8Gi
         pod low cpu=2 priority=1
         decide
         pod high cpu=2 priority=10
         decide
         preempt high
         pod high cpu=2 priority=10 label:seen=yes
         decide
         ends low
         preempt high
         gone low
         pod rival cpu=2 priority=5
         decide
         after 20
         decide",
        // The pod changes before the API shows its nominated node, and waits when the room becomes free.
        "low -> a
         high: 0/1 nodes are available: 1 Insufficient cpu.
         high preempts low on a
         high: 0/1 nodes are available: 1 Insufficient cpu.
         high: Pending
         rival: 0/1 nodes are available: 1 Insufficient cpu.
         high -> a",
    );
}
