//! The room on single GPUs, which nodes publish.

use crate::script::check;

#[test]
fn a_share_needs_one_gpu_with_room() {
    check(
        "node a cpu=8 cores=200 units=80 gpus:/
         pod a1 cores=70 units=1
         pod a2 cores=70 units=1
         pod half cores=50 units=1
         pod rest cores=30 units=1
         pod whole gpu=0 cores=100
         decide
         node b cpu=8 cores=200 units=80 gpus:other=40/
         after 60
         decide",
        "a1 -> a
         a2 -> a
         half: 0/1 nodes are available: 1 node(s) had no GPU with 50 % and 0.25 GiB of memory free.
         rest -> a
         whole: 0/1 nodes are available: 1 Insufficient mayfly.dev/vcuda-core.
         half -> b
         whole -> b",
    );
}

#[test]
fn what_the_node_has_allocated_counts_instead_of_the_prediction() {
    // Predicted: both on one GPU. The node has allocated one on each.
    check(
        "node a cores=200 units=80 gpus:/
         pod p1 cores=40 units=1
         pod p2 cores=40 units=1
         decide
         node a cores=200 units=80 gpus:p1=40/p2=40
         pod large cores=80 units=1
         decide
         gone p1
         after 60
         decide",
        "p1 -> a
         p2 -> a
         large: 0/1 nodes are available: 1 node(s) had no GPU with 80 % and 0.25 GiB of memory free.
         large -> a",
    );
}

#[test]
fn a_share_is_made_free_by_preemption() {
    check(
        "node a cores=200 units=80 gpus:/
         pod low cores=70 units=1 priority=1
         pod high cores=70 units=1 priority=5
         decide
         node a cores=200 units=80 gpus:high=70/low=70
         pod mid cores=50 units=1 priority=3
         decide
         preempt mid",
        "high -> a
         low -> a
         mid: 0/1 nodes are available: 1 node(s) had no GPU with 50 % and 0.25 GiB of memory free.
         mid preempts low on a",
    );
}
