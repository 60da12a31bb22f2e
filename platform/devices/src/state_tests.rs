use proptest::prelude::*;

use super::*;

const RESOURCE: &str = "vendor.example/gpu";
const AT: Duration = Duration::from_secs(10);

fn list(devices: &[(&str, bool)]) -> BTreeMap<String, DeviceState> {
    let state = |healthy| DeviceState { healthy, numa: BTreeSet::new() };
    devices.iter().map(|(id, healthy)| ((*id).to_owned(), state(*healthy))).collect()
}

fn ids(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn key(pod: &str, container: &str) -> EntryKey {
    (PodUid(pod.into()), container.into(), RESOURCE.into())
}

fn with(devices: &[(&str, bool)]) -> (DeviceLedger, Generation) {
    let mut book = DeviceLedger::default();
    let generation = connect(&mut book, RESOURCE, "a.sock", EndpointOptions::default());
    book.update(RESOURCE, generation, list(devices));
    (book, generation)
}

fn count(book: &DeviceLedger) -> (u64, u64) {
    let counts = book.counts();
    let of = |map: &BTreeMap<String, u64>| map.get(RESOURCE).copied().unwrap_or(u64::MAX);
    (of(&counts.capacity), of(&counts.allocatable))
}

/// Allocates devices to a container, as the manager does.
fn give(
    book: &mut DeviceLedger,
    key: &EntryKey,
    asks: usize,
    reusable: &BTreeSet<String>,
) -> BTreeSet<String> {
    match book.choose(key, asks, reusable).unwrap() {
        DeviceChoice::Kept(ids) => ids,
        DeviceChoice::From { available, must_include, count } => {
            let ids = DeviceLedger::pick(&available, &must_include, count, &[]);
            book.reserve(key.clone(), &ids);
            book.complete(key, vec![1]);
            ids
        }
    }
}

/// Upstream: `TestUpdateCapacityAllocatable`.
/// Records a plugin whose connection is made at once.
fn connect(book: &mut DeviceLedger, resource: &str, socket: &str, options: EndpointOptions) -> Generation {
    let generation = book.begin_connection();
    assert!(book.connect(generation, resource, socket, options));
    generation
}

#[test]
fn capacity_counts_all_devices_and_allocatable_the_healthy_ones() {
    let (mut book, generation) = with(&[("a", true), ("b", true), ("c", false)]);
    assert_eq!(count(&book), (3, 2));
    assert!(book.update(RESOURCE, generation, list(&[("a", true), ("b", true)])));
    assert_eq!(count(&book), (2, 2));
    assert!(!book.update(RESOURCE, generation, list(&[("a", true), ("b", true)])), "nothing changed");
    book.update(RESOURCE, generation, list(&[("a", false), ("b", true)]));
    assert_eq!(count(&book), (2, 1));
    assert!(book.disconnect(RESOURCE, generation, AT));
    assert_eq!(count(&book), (2, 0), "capacity stays while the plugin may come back");
    assert!(!book.expire(AT));
    assert!(book.expire(AT + STOP_GRACE));
    assert_eq!(count(&book), (0, 0), "the resource is listed as gone");
}

/// Upstream: `TestDevicePluginReRegistration`.
#[test]
fn a_plugin_that_registers_again_replaces_its_devices() {
    let (mut book, old) = with(&[("a", true), ("b", true)]);
    let new = connect(&mut book, RESOURCE, "a.sock", EndpointOptions::default());
    assert_eq!(count(&book), (2, 2), "devices stay until the new connection lists its own");
    book.update(RESOURCE, new, list(&[("c", true)]));
    assert_eq!(count(&book), (1, 1));
    assert!(!book.update(RESOURCE, old, list(&[("z", true)])), "the old connection is not heard");
}

/// Upstream documents the opposite as a bug: `TestSameSocketRace_LateDisconnectAfterReconnect`.
#[test]
fn a_late_disconnect_does_not_touch_the_new_connection() {
    let (mut book, old) = with(&[("a", true)]);
    let new = connect(&mut book, RESOURCE, "a.sock", EndpointOptions::default());
    book.update(RESOURCE, new, list(&[("a", true)]));
    assert!(!book.disconnect(RESOURCE, old, AT));
    assert_eq!(count(&book), (1, 1));
    assert_eq!(book.endpoint(RESOURCE).unwrap().0, new);
}

/// Upstream: `TestPluginConnected_DifferentSocketsCoexist`, `TestPluginDisconnected_PromotesSurvivor`,
/// `TestPluginDisconnected_LastEndpointMarksUnhealthy`.
#[test]
fn another_socket_takes_over_when_one_goes() {
    let (mut book, first) = with(&[("a", true)]);
    let second = connect(&mut book, RESOURCE, "b.sock", EndpointOptions::default());
    book.update(RESOURCE, second, list(&[("a", true), ("b", true)]));
    assert_eq!(count(&book), (2, 2));
    book.disconnect(RESOURCE, second, AT);
    assert_eq!((count(&book), book.endpoint(RESOURCE).unwrap().0), ((1, 1), first));
    book.disconnect(RESOURCE, first, AT);
    assert_eq!((count(&book), book.endpoint(RESOURCE)), ((1, 0), None));
}

/// Upstream: `TestPodContainerDeviceAllocation`.
#[test]
fn a_container_keeps_its_devices_and_others_get_the_rest() {
    let (mut book, _) = with(&[("a", true), ("b", true), ("c", true)]);
    let none = BTreeSet::new();
    let (one, two) = (key("p1", "c"), key("p2", "c"));
    let given = give(&mut book, &one, 2, &none);
    assert_eq!(give(&mut book, &one, 2, &none), given);
    assert!(matches!(book.choose(&one, 1, &none), Err(ChoiceError::Changed { has: 2, asks: 1, .. })));
    let left = book.choose(&two, 2, &none).unwrap_err();
    assert!(matches!(left, ChoiceError::Unavailable { asks: 2, available: 1, .. }) && !left.is_transient());
    assert!(book.release(&one.0) && !book.release(&one.0));
    assert_eq!(give(&mut book, &two, 3, &none).len(), 3);
}

/// Upstream: `TestInitContainerDeviceAllocation`.
#[test]
fn devices_of_an_init_container_are_used_again() {
    let (mut book, _) = with(&[("a", true), ("b", true)]);
    let init = give(&mut book, &key("p", "init"), 1, &BTreeSet::new());
    let main = give(&mut book, &key("p", "main"), 2, &init);
    assert!(main.is_superset(&init));
    assert_eq!(main, ids(&["a", "b"]));
}

#[test]
fn a_missing_plugin_is_a_passing_reason_and_a_device_that_broke_is_none() {
    let (mut book, generation) = with(&[("a", true), ("b", true)]);
    let key = key("p", "c");
    book.update(RESOURCE, generation, list(&[("a", false), ("b", false)]));
    let error = book.choose(&key, 1, &BTreeSet::new()).unwrap_err();
    assert_eq!(error, ChoiceError::Unhealthy(RESOURCE.into()));
    assert!(error.is_transient());
    book.update(RESOURCE, generation, list(&[("a", false), ("b", true)]));
    assert!(matches!(book.choose(&key, 1, &ids(&["a"])), Err(ChoiceError::NoLongerHealthy(_))));
    book.disconnect(RESOURCE, generation, AT);
    assert!(book.choose(&key, 1, &BTreeSet::new()).unwrap_err().is_transient());
}

/// Upstream: `TestUpdateCapacityAllocatable`, where a stopped endpoint refuses `PreStartContainer`.
#[test]
fn a_plugin_that_is_away_is_called_before_a_start_if_it_was_before() {
    for required in [false, true] {
        let mut book = DeviceLedger::default();
        let options = EndpointOptions { pre_start_required: required, preferred_allocation: false };
        let generation = connect(&mut book, RESOURCE, "a.sock", options);
        assert_eq!(book.needs_pre_start(RESOURCE), required);
        book.disconnect(RESOURCE, generation, AT);
        assert_eq!(book.needs_pre_start(RESOURCE), required);
    }
    let restarted = DeviceLedger::restore(BTreeMap::new(), &[RESOURCE.to_owned()], AT);
    assert!(restarted.needs_pre_start(RESOURCE), "its options are not known yet");
}

#[test]
fn a_preference_is_followed_where_it_can_be() {
    let available = ids(&["a", "b", "c", "d"]);
    let pick = |must: &[&str], count, preferred: &[&str]| {
        let preferred: Vec<String> = preferred.iter().map(|id| (*id).to_owned()).collect();
        DeviceLedger::pick(&available, &ids(must), count, &preferred)
    };
    assert_eq!(pick(&[], 2, &["d", "c"]), ids(&["c", "d"]));
    assert_eq!(pick(&["a"], 2, &["d", "c"]), ids(&["a", "d"]));
    assert_eq!(pick(&[], 2, &["strange"]), ids(&["a", "b"]), "unknown ids count for nothing");
}

#[test]
fn topology_is_kept_by_numa_node() {
    let mut book = DeviceLedger::default();
    let generation = connect(&mut book, RESOURCE, "a.sock", EndpointOptions::default());
    let near = |nodes: &[i64]| DeviceState { healthy: true, numa: nodes.iter().copied().collect() };
    let devices = [("a".to_owned(), near(&[0, 1])), ("b".to_owned(), near(&[]))];
    book.update(RESOURCE, generation, devices.into());
    let key = key("p", "c");
    book.reserve(key.clone(), &ids(&["a", "b"]));
    let entry = book.entry(&key).unwrap();
    assert_eq!(entry.devices, [(-1, ids(&["b"])), (0, ids(&["a"])), (1, ids(&["a"]))].into());
    assert_eq!(entry.ids(), ids(&["a", "b"]));
}

#[derive(Clone, Debug)]
enum Event {
    Connect(u8),
    List(usize, u8),
    Disconnect(usize),
    Allocate(u8, usize),
    Release(u8),
    Expire,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..3u8).prop_map(Event::Connect),
        (0..8usize, any::<u8>()).prop_map(|(at, bits)| Event::List(at, bits)),
        (0..8usize).prop_map(Event::Disconnect),
        (0..6u8, 1..4usize).prop_map(|(pod, asks)| Event::Allocate(pod, asks)),
        (0..6u8).prop_map(Event::Release),
        Just(Event::Expire),
    ]
}

proptest! {
    /// No device is allocated to two pods, allocatable never exceeds capacity, and a disconnected plugin is not used.
    #[test]
    fn devices_have_one_owner(events in proptest::collection::vec(event(), 1..80)) {
        let (mut book, first) = with(&[("d0", true), ("d1", true), ("d2", true)]);
        let mut connections = vec![first];
        for (at, event) in events.into_iter().enumerate() {
            let now = Duration::from_secs(60 * at as u64);
            match event {
                Event::Connect(socket) => connections.push(
                    connect(&mut book, RESOURCE, &format!("{socket}.sock"), EndpointOptions::default())),
                Event::List(at, bits) => {
                    let devices: Vec<_> = (0..8).map(|bit| (format!("d{bit}"), bits & (1 << bit) != 0)).collect();
                    let devices: Vec<_> = devices.iter().map(|(id, healthy)| (id.as_str(), *healthy)).collect();
                    book.update(RESOURCE, connections[at % connections.len()], list(&devices));
                }
                Event::Disconnect(at) => {
                    book.disconnect(RESOURCE, connections[at % connections.len()], now);
                }
                Event::Allocate(pod, asks) => {
                    let key = key(&pod.to_string(), "c");
                    let chosen = book.choose(&key, asks, &BTreeSet::new());
                    if let Ok(DeviceChoice::From { available, must_include, count }) = chosen {
                        prop_assert!(book.endpoint(RESOURCE).is_some());
                        let ids = DeviceLedger::pick(&available, &must_include, count, &[]);
                        prop_assert_eq!(ids.len(), asks);
                        book.reserve(key, &ids);
                    }
                }
                Event::Release(pod) => {
                    book.release(&PodUid(pod.to_string()));
                }
                Event::Expire => {
                    book.expire(now);
                }
            }
            let (capacity, allocatable) = count(&book);
            prop_assert!(allocatable <= capacity);
            let given: Vec<String> =
                book.allocations().into_iter().flat_map(|allocation| allocation.devices).collect();
            let distinct: HashSet<&String> = given.iter().collect();
            prop_assert_eq!(distinct.len(), given.len());
        }
    }
}

/// Upstream: `TestUpdateAllocatedResourcesStatus`.
#[test]
fn devices_in_use_have_the_health_that_their_plugin_reports() {
    let (mut book, generation) = with(&[("a", true), ("g::0", true), ("g::1", true)]);
    give(&mut book, &key("p", "c1"), 1, &BTreeSet::new());
    give(&mut book, &key("p", "c2"), 2, &BTreeSet::new());
    let health = |book: &DeviceLedger| {
        let in_use = book.in_use(&PodUid("p".into())).into_iter();
        in_use
            .map(|one| format!("{} {} {}", one.container, one.device, one.health.name()))
            .collect::<Vec<_>>()
    };
    assert_eq!(health(&book), ["c1 a Healthy", "c2 g Healthy"], "shares of a device are one device");
    book.update(RESOURCE, generation, list(&[("g::0", true), ("g::1", false)]));
    assert_eq!(health(&book), ["c1 a Unknown", "c2 g Unhealthy"], "device a is not listed");
    book.update(RESOURCE, generation, list(&[("a", false), ("g::0", true), ("g::1", true)]));
    assert_eq!(health(&book), ["c1 a Unhealthy", "c2 g Healthy"], "a device may recover");
    book.disconnect(RESOURCE, generation, AT);
    assert_eq!(health(&book), ["c1 a Unknown", "c2 g Unknown"]);
    let generation = connect(&mut book, RESOURCE, "a.sock", EndpointOptions::default());
    assert_eq!(health(&book), ["c1 a Unknown", "c2 g Unknown"], "it has not listed its devices yet");
    book.update(RESOURCE, generation, list(&[("a", true), ("g::0", true), ("g::1", true)]));
    assert_eq!(health(&book), ["c1 a Healthy", "c2 g Healthy"]);
    assert!(book.in_use(&PodUid("p2".into())).is_empty());
    book.expire(AT + STOP_GRACE);
    book.release(&PodUid("p".into()));
    assert!(book.in_use(&PodUid("p".into())).is_empty());
}

#[test]
fn a_connection_that_began_earlier_does_not_replace_a_newer_one() {
    let mut book = DeviceLedger::default();
    let options = EndpointOptions::default();
    // Both are being made when the plugin restarts; the old process answers last.
    let (old, new) = (book.begin_connection(), book.begin_connection());
    assert!(book.connect(new, RESOURCE, "a.sock", options));
    assert!(!book.connect(old, RESOURCE, "a.sock", options));
    assert_eq!(book.endpoint(RESOURCE), Some((new, options)));
    assert!(!book.disconnect(RESOURCE, old, Duration::ZERO), "the end of the old one changes nothing");
    assert_eq!(book.generation(RESOURCE, "a.sock"), Some(new));
    // Another socket of the resource is not affected.
    let other = book.begin_connection();
    let last = book.begin_connection();
    assert!(
        book.connect(last, RESOURCE, "a.sock", options) && book.connect(other, RESOURCE, "b.sock", options)
    );
}
