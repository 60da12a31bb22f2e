use serde_json::json;

use super::*;

/// Four GPUs with 10 GiB, in pairs on two NUMA nodes, with these users: number of the GPU, pod, cores, units of memory.
fn gpus(users: &[(usize, &str, u32, u32)]) -> Vec<NodeGpu> {
    let gpu = |index: u32| NodeGpu {
        id: format!("GPU-{index}"),
        index,
        numa: Some(i64::from(index / 2)),
        links: BTreeMap::new(),
        memory: 40,
        broken: false,
        users: BTreeMap::new(),
    };
    let mut gpus: Vec<_> = (0..4).map(gpu).collect();
    for (at, pod, cores, memory_units) in users {
        let load = GpuLoad { whole: false, cores: *cores, memory_units: *memory_units };
        gpus[*at].users.insert((*pod).to_owned(), load);
    }
    gpus
}

fn needs(limits: serde_json::Value) -> GpuNeeds {
    let spec = json!({"containers": [{"name": "c", "resources": {"limits": limits}}]});
    GpuNeeds::of(&serde_json::from_value(spec).unwrap())
}

fn share(cores: u32, memory_units: u32) -> GpuNeeds {
    needs(json!({RESOURCE_CORE: cores.to_string(), RESOURCE_MEMORY: memory_units.to_string()}))
}

fn pods(pods: &[(&str, GpuNeeds)]) -> BTreeMap<String, GpuNeeds> {
    pods.iter().map(|(pod, needs)| ((*pod).to_owned(), needs.clone())).collect()
}

#[test]
fn free_shares_of_several_gpus_are_no_share_of_one() {
    let users = [(0, "a", 70, 4), (1, "b", 80, 4), (2, "c", 60, 4), (3, "d", 60, 4)];
    let bound = pods(&["a", "b", "c", "d"].map(|pod| (pod, share(70, 4))));
    let rooms = rooms(&gpus(&users), &bound);
    let misfit = share(50, 4).misfit(&rooms).unwrap();
    assert_eq!(misfit.to_string(), "50 % and 1 GiB of memory");
    let free: Vec<_> = rooms.iter().map(ToString::to_string).collect();
    let expected = ["0: 30 % and 9 GiB", "1: 20 % and 9 GiB", "2: 40 % and 9 GiB", "3: 40 % and 9 GiB"];
    assert_eq!(free, expected);
    assert_eq!(share(40, 36).misfit(&rooms), None);
    assert!(share(40, 37).misfit(&rooms).is_some(), "no GPU has the memory");
    let whole = needs(json!({RESOURCE_GPU: "1"}));
    assert_eq!(whole.misfit(&rooms).map(|share| share.to_string()).as_deref(), Some("100 %"));
}

#[test]
fn a_bound_pod_without_a_gpu_is_placed_and_an_ended_one_does_not_count() {
    let published = gpus(&[(0, "a", 60, 4), (1, "ended", 100, 40)]);
    let bound =
        pods(&[("a", share(60, 4)), ("new", share(40, 4)), ("whole", needs(json!({RESOURCE_GPU: "2"})))]);
    let rooms = rooms(&published, &bound);
    let free: Vec<_> = rooms.iter().map(|gpu| gpu.free().0).collect();
    assert_eq!(free, [0, 100, 0, 0], "the new pod joins a; the whole GPUs are of one NUMA node");
}

#[test]
fn the_containers_of_a_pod_are_placed_together_and_init_containers_before_them() {
    let container = |cores: &str| json!({"name": "c", "resources": {"limits": {RESOURCE_CORE: cores, RESOURCE_MEMORY: "1"}}});
    let pod = |init: serde_json::Value, containers: &[serde_json::Value]| {
        GpuNeeds::of(
            &serde_json::from_value(json!({"initContainers": init, "containers": containers})).unwrap(),
        )
    };
    let all = rooms(&gpus(&[(0, "a", 40, 1)]), &pods(&[("a", share(40, 1))]));
    let one = &all[..1];
    assert_eq!(pod(json!([]), &[container("30"), container("30")]).misfit(one), None);
    assert!(pod(json!([]), &[container("30"), container("31")]).misfit(one).is_some());
    assert_eq!(pod(json!([container("60")]), &[container("60")]).misfit(one), None, "one after the other");
    let mut sidecar = container("30");
    sidecar["restartPolicy"] = json!("Always");
    assert!(pod(json!([sidecar]), &[container("60")]).misfit(one).is_some());
    // The node refuses the pod with the reason.
    assert_eq!(share(150, 0).misfit(one), None);
}

#[test]
fn a_broken_gpu_has_no_room() {
    let mut published = gpus(&[]);
    published.iter_mut().for_each(|gpu| gpu.broken = true);
    published[3].broken = false;
    published[3].users.insert("w".into(), GpuLoad { whole: true, ..GpuLoad::default() });
    let rooms = rooms(&published, &pods(&[("w", needs(json!({RESOURCE_GPU: "1"})))]));
    assert!(share(1, 1).misfit(&rooms).is_some());
    assert_eq!(rooms[0].to_string(), "0: broken");
    assert_eq!(rooms[3].to_string(), "3: in use as a whole");
}

/// The scheduler predicts the choice from the annotation, so that a later pod is placed beside what is left.
#[test]
fn whole_gpus_are_taken_by_their_links() {
    let mut published = gpus(&[]);
    for (gpu, other) in [(0, 3), (1, 2)] {
        published[gpu].links.insert(other, GpuLink::NvLink(4));
        published[other as usize].links.insert(u32::try_from(gpu).unwrap(), GpuLink::NvLink(4));
    }
    let free = |pods_of_node: &[(&str, GpuNeeds)]| {
        let rooms = rooms(&published, &pods(pods_of_node));
        rooms.iter().filter(|room| room.is_free()).map(|room| room.index).collect::<Vec<_>>()
    };
    let count = |count: &str| needs(json!({RESOURCE_GPU: count}));
    assert_eq!(free(&[("a", count("2"))]), [1, 2]);
    assert_eq!(free(&[("a", count("1"))]), [1, 2, 3]);
    assert_eq!(free(&[("a", count("1")), ("b", count("1"))]), [1, 2], "the linked pair stays whole");
}

#[test]
fn the_annotation_keeps_everything() {
    let mut published = gpus(&[(1, "a", 60, 4)]);
    published[0].links = [(1, GpuLink::Pix), (2, GpuLink::NvLink(18))].into();
    let text = serde_json::to_string(&published).unwrap();
    let node = json!({"metadata": {"annotations": {ANNOTATION_GPUS: text}}});
    assert_eq!(gpus_of(&serde_json::from_value(node).unwrap()), published);
    assert_eq!(gpus_of(&Node::default()), []);
}
