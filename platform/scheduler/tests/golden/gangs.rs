//! Pods that are placed together or not at all.

use crate::script::check;

#[test]
fn of_two_gangs_one_is_placed_whole() {
    check(
        "node n cpu=8 memory=8Gi gpu=4
         pod a1 gpu=1 gang=3 job=a
         pod b1 gpu=1 gang=3 job=b
         pod a2 gpu=1 gang=3 job=a
         pod b2 gpu=1 gang=3 job=b
         decide
         pod a3 gpu=1 gang=3 job=a
         pod b3 gpu=1 gang=3 job=b
         decide
         pod a4 gpu=1 gang=3 job=a
         decide
         gone a1
         gone a2
         after 11
         decide",
        "a1: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         b1: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         a2: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         b2: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         a3 -> n
         a1 -> n
         a2 -> n
         b3: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b1: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         a4 -> n
         b1: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b3: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.",
    );
}

#[test]
fn half_placed_gangs_do_not_block_each_other_for_ever() {
    // Two bindings fail, and another pod takes the room: each gang holds a node that the other one needs.
    check(
        "node n cpu=8 memory=8Gi gpu=4
         pod a1 gpu=1 gang=2 job=a
         pod a2 gpu=1 gang=2 job=a
         pod b1 gpu=1 gang=2 job=b
         pod b2 gpu=1 gang=2 job=b
         decide
         fail a2
         fail b2
         pod other gpu=2 priority=1
         decide
         pod a2 gpu=1 gang=2 job=a
         pod b2 gpu=1 gang=2 job=b
         decide
         after 299
         overdue
         after 2
         overdue
         gone a1
         gone b1
         pod a3 gpu=1 gang=2 job=a
         pod b3 gpu=1 gang=2 job=b
         after 11
         decide
         after 400
         overdue",
        "a1 -> n
         a2 -> n
         b1 -> n
         b2 -> n
         other -> n
         a2: its gang of 2 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 2 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         a1 is released
         b1 is released
         a2 -> n
         a3 -> n
         b2: its gang of 2 pods is placed together, and 0 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b3: its gang of 2 pods is placed together, and 0 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.",
    );
    check(
        "node n cpu=8 memory=8Gi
         pod alone gang=2
         pod odd gang=two job=j
         decide",
        "alone: 0/1 nodes are available: a pod with the annotation mayfly.dev/gang needs a controller, such as a Job.
         odd: 0/1 nodes are available: the annotation mayfly.dev/gang is \"two\", not a number of pods from 1 to 1024.",
    );
}
