use serde_json::{Value, json};

use super::*;
use crate::plan::SERVICE_NAME_LABEL;

/// Adds a Service of the namespace `shop` with its endpoints to a zone.
fn add(zone: &mut Zone, name: &str, spec: Value, slices: &[Value]) {
    let service =
        serde_json::from_value(json!({"metadata": {"namespace": "shop", "name": name}, "spec": spec}));
    let slice = |value: &Value| {
        let metadata = json!({"namespace": "shop", "name": name, "labels": {SERVICE_NAME_LABEL: name}});
        let mut slice = json!({"metadata": metadata, "addressType": "IPv4"});
        slice["ports"] = value["ports"].clone();
        slice["endpoints"] = value["endpoints"].clone();
        serde_json::from_value(slice).unwrap()
    };
    let slices: Vec<_> = slices.iter().map(slice).collect();
    zone.set(&ObjectKey::new("shop", name), ServiceRecords::of(&service.unwrap(), &slices, Some("here")));
}

fn zone() -> Zone {
    let mut zone = Zone::new("cluster.local");
    let ports =
        json!([{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}, {"port": 9}]);
    add(
        &mut zone,
        "web",
        json!({"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "fd00::7"], "ports": ports}),
        &[],
    );
    let slice = json!({
        "ports": [{"name": "sql", "port": 5432, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "hostname": "db-0", "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"]},
            {"addresses": ["127.64.0.1"], "hostname": "db-3", "nodeName": "there"},
            {"addresses": ["10.0.0.3"], "hostname": "db-2", "conditions": {"ready": false}},
        ],
    });
    add(&mut zone, "db", json!({"clusterIP": "None", "ports": [{"name": "sql", "port": 5432}]}), &[slice]);
    add(&mut zone, "none", json!({"clusterIP": "None"}), &[]);
    add(&mut zone, "away", json!({"type": "ExternalName", "externalName": "www.example.com"}), &[]);
    zone.complete();
    zone
}

/// The answer in one line: records without owner and TTL, or the reason for an empty answer.
fn asked(zone: &Zone, name: &str, kind: RecordType) -> String {
    let text = |records: &[ZoneRecord]| {
        let data = |record: &ZoneRecord| match &record.data {
            RecordData::Address(address) => address.to_string(),
            RecordData::Srv { weight, port, target } => format!("{weight} {port} {target}"),
            RecordData::Ptr(text) | RecordData::Cname(text) | RecordData::Txt(text) => text.clone(),
            RecordData::Soa => "SOA".to_owned(),
        };
        let mut all: Vec<_> = records.iter().map(data).collect();
        all.sort();
        all.join(" | ")
    };
    match zone.answer(name, kind) {
        ZoneAnswer::Records { answers, additionals } if additionals.is_empty() => text(&answers),
        ZoneAnswer::Records { answers, additionals } => {
            format!("{} + {}", text(&answers), text(&additionals))
        }
        ZoneAnswer::Alias(target) => format!("alias {target}"),
        other => format!("{other:?}"),
    }
}

#[test]
fn answers_follow_the_specification() {
    let zone = zone();
    use RecordType::{
        A, Aaaa as AAAA, Any as ANY, Other as MX, Ptr as PTR, Soa as SOA, Srv as SRV, Txt as TXT,
    };
    let web = "web.shop.svc.cluster.local";
    let db = "db.shop.svc.cluster.local";
    for (name, kind, expected) in [
        // Specification 2.2.
        ("dns-version.cluster.local".to_owned(), TXT, "1.1.0"),
        // 2.3: a Service with cluster IPs.
        (web.to_owned(), A, "10.96.0.7"),
        ("WEB.Shop.svc.cluster.LOCAL".to_owned(), A, "10.96.0.7"),
        (web.to_owned(), AAAA, "fd00::7"),
        (web.to_owned(), ANY, "10.96.0.7 | fd00::7"),
        (web.to_owned(), MX, "NoData"),
        (format!("_http._tcp.{web}"), SRV, "100 80 web.shop.svc.cluster.local + 10.96.0.7 | fd00::7"),
        (format!("_dns._udp.{web}"), SRV, "100 53 web.shop.svc.cluster.local + 10.96.0.7 | fd00::7"),
        (format!("_http._udp.{web}"), SRV, "NoName"),
        (
            web.to_owned(),
            SRV,
            "33 53 web.shop.svc.cluster.local | 33 80 web.shop.svc.cluster.local | 33 9 web.shop.svc.cluster.local + 10.96.0.7 | fd00::7",
        ),
        (format!("_http._tcp.{web}"), A, "NoData"),
        (format!("_tcp.{web}"), SRV, "NoData"),
        (format!("_sctp.{web}"), SRV, "NoName"),
        (format!("pod.{web}"), A, "NoName"),
        ("7.0.96.10.in-addr.arpa".to_owned(), PTR, "web.shop.svc.cluster.local"),
        // 2.4: headless.
        (db.to_owned(), A, "10.0.0.1 | 10.0.0.2"),
        (db.to_owned(), AAAA, "NoData"),
        (format!("db-0.{db}"), A, "10.0.0.1"),
        (format!("10-0-0-2.{db}"), A, "10.0.0.2"),
        (format!("db-2.{db}"), A, "NoName"),
        (
            format!("_sql._tcp.{db}"),
            SRV,
            "50 5432 10-0-0-2.db.shop.svc.cluster.local | 50 5432 db-0.db.shop.svc.cluster.local + 10.0.0.1 | 10.0.0.2",
        ),
        (
            db.to_owned(),
            SRV,
            "50 5432 10-0-0-2.db.shop.svc.cluster.local | 50 5432 db-0.db.shop.svc.cluster.local + 10.0.0.1 | 10.0.0.2",
        ),
        ("none.shop.svc.cluster.local".to_owned(), SRV, "NoData"),
        ("1.0.0.10.in-addr.arpa".to_owned(), PTR, "db-0.db.shop.svc.cluster.local"),
        ("3.0.0.10.in-addr.arpa".to_owned(), PTR, "Outside"),
        ("none.shop.svc.cluster.local".to_owned(), A, "NoData"),
        // 2.5: ExternalName.
        ("away.shop.svc.cluster.local".to_owned(), A, "alias www.example.com"),
        // Pods.
        ("10-1-2-3.shop.pod.cluster.local".to_owned(), A, "10.1.2.3"),
        ("fd00--1.shop.pod.cluster.local".to_owned(), AAAA, "fd00::1"),
        ("10-1-2.shop.pod.cluster.local".to_owned(), A, "NoName"),
        ("shop.pod.cluster.local".to_owned(), A, "NoData"),
        // Intermediate names exist.
        ("cluster.local".to_owned(), A, "NoData"),
        ("cluster.local".to_owned(), SOA, "SOA"),
        ("shop.svc.cluster.local".to_owned(), A, "NoData"),
        ("sho.svc.cluster.local".to_owned(), A, "NoName"),
        ("other.shop.svc.cluster.local".to_owned(), A, "NoName"),
        ("x.cluster.local".to_owned(), A, "NoName"),
        ("example.com".to_owned(), A, "Outside"),
    ] {
        assert_eq!(asked(&zone, &name, kind), expected, "{name} {kind:?}");
    }
}

#[test]
fn an_incomplete_zone_denies_no_name() {
    let mut zone = Zone::new("cluster.local");
    add(&mut zone, "web", json!({"clusterIP": "10.96.0.7", "ports": []}), &[]);
    let names = [
        ("web.shop.svc.cluster.local", RecordType::A, "10.96.0.7", "10.96.0.7"),
        ("web.shop.svc.cluster.local", RecordType::Aaaa, "Incomplete", "NoData"),
        ("other.shop.svc.cluster.local", RecordType::A, "Incomplete", "NoName"),
        ("other.svc.cluster.local", RecordType::A, "Incomplete", "NoName"),
        ("8.0.96.10.in-addr.arpa", RecordType::Ptr, "Incomplete", "Outside"),
        ("example.com", RecordType::A, "Outside", "Outside"),
    ];
    for (name, kind, before, _) in names {
        assert_eq!(asked(&zone, name, kind), before, "{name} {kind:?}");
    }
    zone.complete();
    for (name, kind, _, after) in names {
        assert_eq!(asked(&zone, name, kind), after, "{name} {kind:?}");
    }
}

#[test]
fn records_of_a_service_are_replaced() {
    let mut zone = zone();
    add(&mut zone, "web", json!({"clusterIP": "10.96.0.8", "ports": []}), &[]);
    assert_eq!(asked(&zone, "web.shop.svc.cluster.local", RecordType::A), "10.96.0.8");
    assert_eq!(asked(&zone, "7.0.96.10.in-addr.arpa", RecordType::Ptr), "Outside");
    zone.set(&ObjectKey::new("shop", "web"), None);
    assert_eq!(asked(&zone, "web.shop.svc.cluster.local", RecordType::A), "NoName");
    assert_eq!(asked(&zone, "8.0.96.10.in-addr.arpa", RecordType::Ptr), "Outside");
}

#[test]
fn hosts_of_programs_are_resolved() {
    let zone = zone();
    let found = |texts: &[&str]| {
        Some(HostAddresses::Addresses(texts.iter().map(|text| text.parse().unwrap()).collect()))
    };
    for (host, expected) in [
        ("web.shop", found(&["10.96.0.7", "fd00::7"])),
        ("web.shop.svc", found(&["10.96.0.7", "fd00::7"])),
        ("Web.Shop.svc.cluster.local.", found(&["10.96.0.7", "fd00::7"])),
        ("db-0.db.shop.svc", found(&["10.0.0.1"])),
        ("away.shop", Some(HostAddresses::Alias("www.example.com".into()))),
        // A missing name of the cluster must not be looked up elsewhere; other names may be public.
        ("gone.shop.svc.cluster.local", found(&[])),
        ("example.com", None),
        ("web", None),
        ("web.other", None),
    ] {
        assert_eq!(zone.resolve(host), expected, "{host}");
    }
}
