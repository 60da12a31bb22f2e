use serde_json::json;

use super::*;

const DEVICE: u32 = 9;

fn config(routing: PodRouting) -> OverlayConfig {
    OverlayConfig {
        node: "a".into(),
        pods: "10.212.0.0/16".parse().unwrap(),
        routing,
        vxlan: VxlanNetwork { id: 5, port: 8472 },
        owner: RouteOwner(7),
    }
}

fn node(name: &str, range: &str, address: &str, network: Option<&str>) -> OverlayNode {
    let address = address.parse().unwrap();
    let network = network.map(|network| network.parse().unwrap());
    let tunnel = TunnelEndpoint { mac: MacAddress::of_tunnel(5, address), address, network };
    OverlayNode { name: name.into(), range: range.parse().unwrap(), address, tunnel: Some(tunnel) }
}

fn own() -> OverlayNode {
    node("a", "10.212.1.0/24", "192.0.2.1", Some("192.0.2.0/24"))
}

/// A node in the network of `own`.
fn neighbour() -> OverlayNode {
    node("b", "10.212.2.0/24", "192.0.2.2", Some("192.0.2.0/24"))
}

/// A node behind a router.
fn far() -> OverlayNode {
    node("c", "10.212.3.0/24", "198.51.100.3", Some("198.51.100.0/24"))
}

/// A machine with one Ethernet device and a bridge of pods.
fn machine() -> KernelState {
    let link = |index, name: &str| NetworkLink {
        index,
        name: name.into(),
        mac: None,
        mtu: 1500,
        is_up: true,
        vxlan: None,
    };
    let address = |link, address: &str| LinkAddress { link, address: address.parse().unwrap() };
    KernelState {
        links: vec![link(1, "lo"), link(2, "eth0"), link(3, "mf-1")],
        addresses: vec![address(1, "127.0.0.1/8"), address(2, "192.0.2.1/24"), address(3, "10.212.1.1/24")],
        ..KernelState::default()
    }
}

/// Executes steps on the state, as the kernel does.
fn executed(mut kernel: KernelState, steps: &[OverlayStep]) -> KernelState {
    fn forget(kernel: &mut KernelState, link: u32) {
        kernel.addresses.retain(|of| of.link != link);
        kernel.routes.retain(|of| of.link != link);
        kernel.neighbours.retain(|of| of.link != link);
        kernel.forwarding.retain(|of| of.link != link);
    }
    for step in steps {
        match step.clone() {
            OverlayStep::EnableForwarding => kernel.ip_forward = true,
            OverlayStep::CreateDevice { name, device, mac, mtu } => {
                assert!(kernel.links.iter().all(|link| link.name != name), "{name} exists");
                let (mac, vxlan) = (Some(mac), Some(device));
                kernel.links.push(NetworkLink { index: DEVICE, name, mac, mtu, is_up: true, vxlan });
            }
            OverlayStep::SetDevice { link, mtu } => {
                let link = kernel.links.iter_mut().find(|of| of.index == link).unwrap();
                (link.is_up, link.mtu) = (true, mtu);
            }
            OverlayStep::DeleteDevice { link } => {
                kernel.links.retain(|of| of.index != link);
                forget(&mut kernel, link);
            }
            OverlayStep::AddAddress(of) => kernel.addresses.push(of),
            OverlayStep::DeleteAddress(of) => kernel.addresses.retain(|other| *other != of),
            OverlayStep::SetRoute(route) => {
                let is_same = |other: &KernelRoute| {
                    (other.destination, other.priority) == (route.destination, route.priority)
                };
                kernel.routes.retain(|other| !is_same(other));
                kernel.routes.push(route);
            }
            OverlayStep::DeleteRoute(route) => kernel.routes.retain(|other| *other != route),
            OverlayStep::SetNeighbour(of) => {
                kernel.neighbours.retain(|other| (other.link, other.address) != (of.link, of.address));
                kernel.neighbours.push(of);
            }
            OverlayStep::DeleteNeighbour(of) => kernel.neighbours.retain(|other| *other != of),
            OverlayStep::SetForwarding(of) => {
                kernel.forwarding.retain(|other| (other.link, other.mac) != (of.link, of.mac));
                kernel.forwarding.push(of);
            }
            OverlayStep::DeleteForwarding(of) => kernel.forwarding.retain(|other| *other != of),
        }
    }
    kernel
}

/// Plans and executes until nothing is left to do: twice at most.
fn settled(
    config: &OverlayConfig,
    peers: &[OverlayNode],
    mut kernel: KernelState,
) -> (KernelState, OverlayPlan) {
    for _ in 0..3 {
        let planned = plan(config, &own(), peers, &kernel);
        if planned.steps.is_empty() {
            return (kernel, planned);
        }
        kernel = executed(kernel, &planned.steps);
    }
    panic!("the third plan still has steps: {:?}", plan(config, &own(), peers, &kernel).steps)
}

/// The routes of the owner, as `ip route` shows them.
fn routes(kernel: &KernelState) -> Vec<String> {
    let own = kernel.routes.iter().filter(|route| route.priority == 7 && route.protocol == ROUTE_PROTOCOL);
    let name = |index| &kernel.links.iter().find(|link| link.index == index).unwrap().name;
    let mut all: Vec<_> = own
        .map(|route| format!("{} via {} dev {}", route.destination, route.gateway.unwrap(), name(route.link)))
        .collect();
    all.sort();
    all
}

#[test]
fn nodes_of_one_network_are_reached_directly_and_others_through_the_device() {
    let (kernel, planned) = settled(&config(PodRouting::Auto), &[neighbour(), far()], machine());
    let expected = ["10.212.2.0/24 via 192.0.2.2 dev eth0", "10.212.3.0/24 via 10.212.3.0 dev mayfly.5"];
    assert_eq!(routes(&kernel), expected);
    let mac = far().tunnel.unwrap().mac;
    let neighbour = NeighbourEntry { link: DEVICE, address: "10.212.3.0".parse().unwrap(), mac };
    assert_eq!(kernel.neighbours, [neighbour]);
    assert_eq!(kernel.forwarding, [ForwardingEntry { link: DEVICE, mac, to: far().address }]);
    let own_address = LinkAddress { link: DEVICE, address: "10.212.1.0/32".parse().unwrap() };
    assert!(kernel.addresses.contains(&own_address) && kernel.ip_forward);
    assert_eq!(planned.pod_mtu, Some(1450));
    assert_eq!(planned.endpoint, own().tunnel.unwrap());
    assert!(planned.problems.is_empty(), "{:?}", planned.problems);
}

#[test]
fn the_mode_decides_where_both_ways_are_possible() {
    let (kernel, planned) = settled(&config(PodRouting::Vxlan), &[neighbour(), far()], machine());
    let expected = ["10.212.2.0/24 via 10.212.2.0 dev mayfly.5", "10.212.3.0/24 via 10.212.3.0 dev mayfly.5"];
    assert_eq!((routes(&kernel), planned.pod_mtu), (expected.map(str::to_owned).into(), Some(1450)));
    let (kernel, planned) = settled(&config(PodRouting::Direct), &[neighbour(), far()], machine());
    assert_eq!(routes(&kernel), ["10.212.2.0/24 via 192.0.2.2 dev eth0"]);
    assert_eq!((planned.problems.len(), planned.pod_mtu), (1, None), "{:?}", planned.problems);
    assert_eq!(kernel.links, machine().links, "no device");
    // Only one of the nodes sees the other one in its network: both use the tunnel.
    let narrow = node("b", "10.212.2.0/24", "192.0.2.2", Some("192.0.2.2/31"));
    let (kernel, _) = settled(&config(PodRouting::Auto), &[narrow], machine());
    assert_eq!(routes(&kernel), ["10.212.2.0/24 via 10.212.2.0 dev mayfly.5"]);
}

#[test]
fn what_exists_is_adopted_and_only_own_routes_are_removed() {
    let config = config(PodRouting::Auto);
    let (mut kernel, _) = settled(&config, &[neighbour(), far()], machine());
    assert_eq!(plan(&config, &own(), &[neighbour(), far()], &kernel).steps, []);
    let foreign = [
        KernelRoute {
            destination: "10.212.9.0/24".parse().unwrap(),
            gateway: None,
            link: 2,
            protocol: ROUTE_PROTOCOL,
            priority: 8,
        },
        KernelRoute {
            destination: "10.212.3.0/24".parse().unwrap(),
            gateway: None,
            link: 2,
            protocol: 4,
            priority: 7,
        },
    ];
    kernel.routes.extend(foreign);
    let without_far = plan(&config, &own(), &[neighbour()], &kernel);
    assert_eq!(without_far.pod_mtu, None);
    let without_far = executed(kernel.clone(), &without_far.steps);
    assert_eq!(routes(&without_far), ["10.212.2.0/24 via 192.0.2.2 dev eth0"]);
    assert_eq!(without_far.links, machine().links, "the device is not needed any more");
    let removed = executed(kernel.clone(), &removal(&config, &kernel));
    assert_eq!(removed.routes, foreign);
    assert_eq!(removed.links, machine().links);
}

#[test]
fn a_node_that_changes_is_followed() {
    let config = config(PodRouting::Auto);
    let (kernel, _) = settled(&config, &[neighbour(), far()], machine());
    // Another machine under the same name, and one that moved into the network.
    let moved = node("c", "10.212.3.0/24", "203.0.113.7", None);
    let (kernel, _) = settled(&config, &[neighbour(), moved.clone()], kernel);
    let mac = moved.tunnel.unwrap().mac;
    assert_eq!(kernel.forwarding, [ForwardingEntry { link: DEVICE, mac, to: moved.address }]);
    assert_eq!(kernel.neighbours.len(), 1, "{:?}", kernel.neighbours);
    let here = node("c", "10.212.3.0/24", "192.0.2.3", Some("192.0.2.0/24"));
    let (kernel, _) = settled(&config, &[neighbour(), here], kernel);
    let expected = ["10.212.2.0/24 via 192.0.2.2 dev eth0", "10.212.3.0/24 via 192.0.2.3 dev eth0"];
    assert_eq!(routes(&kernel), expected);
}

#[test]
fn a_damaged_device_is_repaired_and_a_foreign_one_is_left_alone() {
    let config = config(PodRouting::Auto);
    let (kernel, _) = settled(&config, &[far()], machine());
    let damages: [fn(&mut NetworkLink); 5] = [
        |link| link.is_up = false,
        |link| link.mtu = 1500,
        |link| link.mac = None,
        |link| link.vxlan.as_mut().unwrap().port = 4789,
        |link| link.vxlan.as_mut().unwrap().local = None,
    ];
    for damage in damages {
        let mut damaged = kernel.clone();
        damage(damaged.links.last_mut().unwrap());
        assert_ne!(damaged, kernel);
        assert_eq!(settled(&config, &[far()], damaged).0, kernel);
    }
    let mut foreign = machine();
    foreign.links.push(NetworkLink { name: "mayfly.5".into(), ..foreign.links[1].clone() });
    let planned = plan(&config, &own(), &[far()], &foreign);
    assert_eq!(planned.steps, [OverlayStep::EnableForwarding]);
    assert!(planned.problems.first().unwrap().contains("mayfly.5"), "{:?}", planned.problems);
}

#[test]
fn nodes_that_cannot_be_reached_are_reported() {
    let config = config(PodRouting::Auto);
    let unpublished = OverlayNode { tunnel: None, ..far() };
    let same_range = node("d", "10.212.3.0/25", "192.0.2.4", Some("192.0.2.0/24"));
    let own_range = node("e", "10.212.1.0/24", "192.0.2.5", Some("192.0.2.0/24"));
    // A second node on this machine needs no route.
    let same_machine = node("f", "10.212.6.0/24", "192.0.2.1", Some("192.0.2.0/24"));
    let (kernel, planned) = settled(&config, &[unpublished, same_range, own_range, same_machine], machine());
    assert!(routes(&kernel).is_empty());
    let problems: Vec<_> = planned.problems.iter().map(|problem| &problem[..7]).collect();
    assert_eq!(problems, ["node c:", "node d:", "node e:"], "{:?}", planned.problems);
}

#[test]
fn a_node_is_read_from_its_object() {
    let pods = "10.212.0.0/16".parse().unwrap();
    let of = |spec: serde_json::Value, address: &str, annotation: Option<&str>| {
        let annotations = annotation.map(|text| json!({super::super::ANNOTATION_TUNNEL: text}));
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "b", "annotations": annotations}, "spec": spec,
            "status": {"addresses": [{"type": "Hostname", "address": "b"}, {"type": "InternalIP", "address": "fd00::2"},
                {"type": "InternalIP", "address": address}]},
        }))
        .unwrap();
        OverlayNode::of(&node, pods)
    };
    let range = json!({"podCIDR": "10.212.2.0/24", "podCIDRs": ["10.212.2.0/24"]});
    let tunnel = neighbour().tunnel.unwrap().to_annotation();
    assert_eq!(of(range.clone(), "192.0.2.2", Some(&tunnel)), Ok(Some(neighbour())));
    assert_eq!(of(json!({}), "192.0.2.2", None), Ok(None), "it has no range yet");
    for (range, address, annotation, problem) in [
        (json!({"podCIDR": "0.0.0.0/0"}), "192.0.2.2", None, "no subnet"),
        (json!({"podCIDR": "10.212.0.0/16"}), "192.0.2.2", None, "no subnet"),
        (json!({"podCIDR": "10.96.0.0/24"}), "192.0.2.2", None, "no subnet"),
        (range.clone(), "127.0.0.1", None, "not reachable"),
        (range.clone(), "10.212.7.7", None, "not reachable"),
        (range, "192.0.2.2", Some("{}"), "address is missing"),
    ] {
        let error = of(range, address, annotation).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}
