//! Rules about combinations of fields of a pod's spec, with upstream's messages (`pkg/apis/core/validation`).

use mayfly_api::validation::FieldError;
use serde_json::{Map, Value};

use super::{
    go_values::go_texts,
    rules::{items, members, not_supported, one_of, text},
};

/// Upstream's bound of `activeDeadlineSeconds`: an int32.
const DEADLINE_SECONDS: std::ops::RangeInclusive<i64> = 1..=i32::MAX as i64;

/// The field of a volume that is not a source.
const VOLUME_NAME: &str = "name";
const PROBE_HANDLERS: [&str; 4] = ["exec", "httpGet", "tcpSocket", "grpc"];
const MOUNT_PROPAGATIONS: [&str; 3] = ["Bidirectional", "HostToContainer", "None"];
/// Limits of a resolver's configuration (upstream's `MaxDNSNameservers` and related ones).
const NAMESERVERS_MAX: usize = 3;
const SEARCHES_MAX: usize = 32;
const SEARCHES_BYTES_MAX: usize = 2048;
const HOOK_HANDLERS: [&str; 4] = ["exec", "httpGet", "tcpSocket", "sleep"];

/// Rules of the spec of a pod or a template.
pub(super) fn check(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) {
    let is_set = |name: &str| spec.get(name) == Some(&Value::Bool(true));
    if is_set("shareProcessNamespace") && is_set("hostPID") {
        let path = format!("{path}.securityContext.shareProcessNamespace");
        let detail = "ShareProcessNamespace and HostPID cannot both be enabled";
        errors.push(FieldError::invalid(path, true, detail));
    }
    let field = |name: &str| spec.get(name).unwrap_or(&Value::Null);
    for (at, volume) in items(field("volumes")) {
        single(volume, |name| name != VOLUME_NAME, &format!("{path}.volumes[{at}]"), "volume", errors);
    }
    dns_config(field("dnsConfig"), field("dnsPolicy") == "None", &format!("{path}.dnsConfig"), errors);
    if let Some(seconds) = field("activeDeadlineSeconds").as_i64()
        && !DEADLINE_SECONDS.contains(&seconds)
    {
        let detail = "must be between 1 and 2147483647, inclusive";
        errors.push(FieldError::invalid(format!("{path}.activeDeadlineSeconds"), seconds, detail));
    }
    for (at, toleration) in items(field("tolerations")) {
        check_toleration(toleration, &format!("{path}.tolerations[{at}]"), errors);
    }
    for (at, constraint) in items(field("topologySpreadConstraints")) {
        check_spread(constraint, &format!("{path}.topologySpreadConstraints[{at}]"), errors);
    }
    match text(field("os"), "name") {
        "windows" => check_windows(spec, path, errors),
        "" | "linux" => {}
        other => one_of(other, &["linux", "windows"], &format!("{path}.os.name"), errors),
    }
}

/// The names and options of a resolver (upstream's `validatePodDNSConfig`); `alone` if nothing else configures it.
fn dns_config(config: &Value, alone: bool, path: &str, errors: &mut Vec<FieldError>) {
    if config.is_null() {
        if alone {
            errors.push(FieldError::required(path, "must provide `dnsConfig` when `dnsPolicy` is None"));
        }
        return;
    }
    let servers: Vec<_> = items(&config["nameservers"]).map(|(_, server)| server).collect();
    let of_servers = format!("{path}.nameservers");
    if alone && servers.is_empty() {
        let detail = "must provide at least one DNS nameserver when `dnsPolicy` is None";
        return errors.push(FieldError::required(of_servers, detail));
    }
    if servers.len() > NAMESERVERS_MAX {
        let detail = format!("must not have more than {NAMESERVERS_MAX} nameservers");
        let shown = go_texts("string", &config["nameservers"]);
        errors.push(FieldError::invalid(of_servers.as_str(), shown, detail));
    }
    for (at, server) in servers.into_iter().enumerate() {
        if server.as_str().unwrap_or("").parse::<std::net::IpAddr>().is_err() {
            let detail = "must be valid IP address";
            errors.push(FieldError::invalid(format!("{of_servers}[{at}]"), server, detail));
        }
    }
    let searches: Vec<_> = items(&config["searches"]).filter_map(|(_, search)| search.as_str()).collect();
    let characters = searches.iter().map(|search| search.len() + 1).sum::<usize>().saturating_sub(1);
    for (is_wrong, detail) in [
        (searches.len() > SEARCHES_MAX, format!("must not have more than {SEARCHES_MAX} search paths")),
        (
            characters > SEARCHES_BYTES_MAX,
            format!(
                "must not have more than {SEARCHES_BYTES_MAX} characters (including spaces) in the search list"
            ),
        ),
    ] {
        if is_wrong {
            let shown = go_texts("string", &config["searches"]);
            errors.push(FieldError::invalid(format!("{path}.searches"), shown, detail));
        }
    }
    for (at, search) in searches.into_iter().enumerate() {
        let search = search.strip_suffix('.').unwrap_or(search);
        if let Err(why) = mayfly_api::names::dns_subdomain(search) {
            errors.push(FieldError::invalid(format!("{path}.searches[{at}]"), format!("{search:?}"), why));
        }
    }
    for (at, option) in items(&config["options"]) {
        if text(option, "name").is_empty() {
            errors.push(FieldError::required(format!("{path}.options[{at}]"), "must not be empty"));
        }
    }
}

/// Fields that a pod of Windows cannot have (upstream's `validateWindows`).
fn check_windows(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) {
    let mut refuse = |given: bool, path: String| {
        if given {
            errors.push(FieldError::forbidden(path, "cannot be set for a windows pod"));
        }
    };
    let context = spec.get("securityContext").unwrap_or(&Value::Null);
    let of_context = |name: &str| (!context[name].is_null(), format!("{path}.securityContext.{name}"));
    let (given, place) = of_context("seLinuxOptions");
    refuse(given, place);
    for name in ["hostUsers", "hostPID", "hostIPC"] {
        let given = spec.get(name).is_some_and(|value| name == "hostUsers" || *value == true);
        refuse(given, format!("{path}.{name}"));
    }
    for name in ["seccompProfile", "fsGroup", "fsGroupChangePolicy", "sysctls"] {
        let (given, place) = of_context(name);
        refuse(given, place);
    }
    refuse(spec.contains_key("shareProcessNamespace"), format!("{path}.shareProcessNamespace"));
    for name in ["runAsUser", "runAsGroup", "supplementalGroups"] {
        let (given, place) = of_context(name);
        refuse(given, place);
    }
    for list in ["initContainers", "containers"] {
        for (at, container) in items(spec.get(list).unwrap_or(&Value::Null)) {
            for name in [
                "seLinuxOptions",
                "seccompProfile",
                "capabilities",
                "readOnlyRootFilesystem",
                "privileged",
                "allowPrivilegeEscalation",
                "procMount",
                "runAsUser",
                "runAsGroup",
            ] {
                let given = !container["securityContext"][name].is_null();
                refuse(given, format!("{path}.{list}[{at}].securityContext.{name}"));
            }
        }
    }
}

/// Rules of one container.
pub(super) fn check_container(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let is_handler = |name: &str| PROBE_HANDLERS.contains(&name);
        single(&container[probe], is_handler, &format!("{path}.{probe}"), "handler", errors);
    }
    for hook in ["postStart", "preStop"] {
        let is_handler = |name: &str| HOOK_HANDLERS.contains(&name);
        let path = format!("{path}.lifecycle.{hook}");
        single(&container["lifecycle"][hook], is_handler, &path, "handler", errors);
    }
    for (at, mount) in items(&container["volumeMounts"]) {
        let Some(propagation) = mount["mountPropagation"].as_str() else { continue };
        let path = format!("{path}.volumeMounts[{at}].mountPropagation");
        if !MOUNT_PROPAGATIONS.contains(&propagation) {
            errors.push(not_supported(path, propagation, &MOUNT_PROPAGATIONS));
        } else if propagation == "Bidirectional" && container["securityContext"]["privileged"] != true {
            let detail = "Bidirectional mount propagation is available only to privileged containers";
            errors.push(FieldError::forbidden(path, detail));
        }
    }
}

/// Refuses every member that `counts` but the first, in the order of their names.
fn single(
    value: &Value,
    counts: impl Fn(&str) -> bool,
    path: &str,
    what: &str,
    errors: &mut Vec<FieldError>,
) {
    let mut given: Vec<&str> =
        members(value).filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str()).collect();
    given.retain(|name| counts(name));
    given.sort_unstable();
    for extra in given.iter().skip(1) {
        let detail = format!("may not specify more than 1 {what} type");
        errors.push(FieldError::forbidden(format!("{path}.{extra}"), detail));
    }
}

pub(super) fn check_toleration(toleration: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let field = |name: &str| text(toleration, name);
    let (key, operator, value, effect) = (field("key"), field("operator"), field("value"), field("effect"));
    let seconds = &toleration["tolerationSeconds"];
    if let (false, Err(why)) = (key.is_empty(), crate::meta::qualified_name(key)) {
        errors.push(FieldError::invalid(format!("{path}.key"), format!("{key:?}"), why));
    }
    if key.is_empty() && operator != "Exists" {
        let detail =
            "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
        errors.push(FieldError::invalid(format!("{path}.operator"), format!("{operator:?}"), detail));
    }
    if !seconds.is_null() && effect != "NoExecute" {
        let detail = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        errors.push(FieldError::invalid(format!("{path}.effect"), format!("{effect:?}"), detail));
    }
    match operator {
        "" | "Equal" => {
            if let Err(why) = crate::meta::label_value(value) {
                errors.push(FieldError::invalid(format!("{path}.operator"), format!("{value:?}"), why));
            }
        }
        "Exists" if value.is_empty() => {}
        "Exists" => {
            // The value as Go prints the struct.
            let seconds = if seconds.is_null() { "(*int64)(nil)" } else { "(*int64)" };
            let shown = format!(
                "core.Toleration{{Key:{key:?}, Operator:{operator:?}, Value:{value:?}, Effect:{effect:?}, \
                 TolerationSeconds:{seconds}}}"
            );
            let detail = "value must be empty when `operator` is 'Exists'";
            errors.push(FieldError::invalid(format!("{path}.operator"), shown, detail));
        }
        other => one_of(other, &["Equal", "Exists"], &format!("{path}.operator"), errors),
    }
    if !effect.is_empty() {
        let effects = ["NoExecute", "NoSchedule", "PreferNoSchedule"];
        one_of(effect, &effects, &format!("{path}.effect"), errors);
    }
}

fn check_spread(constraint: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let skew = constraint["maxSkew"].as_i64().unwrap_or(0);
    if skew <= 0 {
        errors.push(FieldError::invalid(format!("{path}.maxSkew"), skew, "must be greater than zero"));
    }
    let key = text(constraint, "topologyKey");
    if key.is_empty() {
        errors.push(FieldError::required(format!("{path}.topologyKey"), "can not be empty"));
    } else if let Err(why) = crate::meta::qualified_name(key) {
        errors.push(FieldError::invalid(format!("{path}.topologyKey"), format!("{key:?}"), why));
    }
    let action = text(constraint, "whenUnsatisfiable");
    one_of(action, &["DoNotSchedule", "ScheduleAnyway"], &format!("{path}.whenUnsatisfiable"), errors);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(spec: Value) -> Vec<String> {
        let mut errors = Vec::new();
        check(spec.as_object().unwrap(), "spec", &mut errors);
        for (at, container) in items(&spec["containers"]) {
            check_container(container, &format!("spec.containers[{at}]"), &mut errors);
        }
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    /// The texts are recorded from kube-apiserver 1.28.
    #[test]
    fn combinations_are_refused_in_upstreams_words() {
        for (spec, expected) in [
            (
                json!({"volumes": [{"name": "v", "emptyDir": {}, "hostPath": {"path": "/x"}}]}),
                "spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type",
            ),
            (
                json!({"containers": [{"livenessProbe": {"httpGet": {"port": 80}, "exec": {}, "periodSeconds": 1}}]}),
                "spec.containers[0].livenessProbe.httpGet: Forbidden: may not specify more than 1 handler type",
            ),
            (
                json!({"containers": [{"volumeMounts": [{"mountPropagation": "Bidirectional"}]}]}),
                "spec.containers[0].volumeMounts[0].mountPropagation: Forbidden: Bidirectional mount propagation is \
                 available only to privileged containers",
            ),
            (
                json!({"containers": [{"volumeMounts": [{"mountPropagation": "Both"}]}]}),
                "spec.containers[0].volumeMounts[0].mountPropagation: Unsupported value: \"Both\": supported values: \
                 \"Bidirectional\", \"HostToContainer\", \"None\"",
            ),
            (
                json!({"hostPID": true, "shareProcessNamespace": true}),
                "spec.securityContext.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID \
                 cannot both be enabled",
            ),
            (
                json!({"dnsPolicy": "None"}),
                "spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None",
            ),
            (
                json!({"dnsPolicy": "None", "dnsConfig": {}}),
                "spec.dnsConfig.nameservers: Required value: must provide at least one DNS nameserver when `dnsPolicy` \
                 is None",
            ),
            (
                json!({"dnsConfig": {"nameservers": ["dns"]}}),
                "spec.dnsConfig.nameservers[0]: Invalid value: \"dns\": must be valid IP address",
            ),
            (
                json!({"dnsConfig": {"options": [{"value": "1"}]}}),
                "spec.dnsConfig.options[0]: Required value: must not be empty",
            ),
            (
                json!({"os": {"name": "windows"}, "securityContext": {"runAsUser": 1}}),
                "spec.securityContext.runAsUser: Forbidden: cannot be set for a windows pod",
            ),
            (
                json!({"activeDeadlineSeconds": 0}),
                "spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive",
            ),
            (
                json!({"tolerations": [{"operator": "Exists", "value": "v"}]}),
                "spec.tolerations[0].operator: Invalid value: core.Toleration{Key:\"\", Operator:\"Exists\", \
                 Value:\"v\", Effect:\"\", TolerationSeconds:(*int64)(nil)}: value must be empty when `operator` is \
                 'Exists'",
            ),
        ] {
            assert_eq!(told(spec), [expected]);
        }
        let constraint = json!({"maxSkew": 0, "topologyKey": "", "whenUnsatisfiable": "X"});
        assert_eq!(
            told(json!({"topologySpreadConstraints": [constraint]})),
            [
                "spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero",
                "spec.topologySpreadConstraints[0].topologyKey: Required value: can not be empty",
                "spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: \"X\": supported values: \
                 \"DoNotSchedule\", \"ScheduleAnyway\"",
            ]
        );
    }

    #[test]
    fn usual_specs_pass() {
        let constraint = json!({"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway"});
        let spec = json!({
            "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "configMap": {"name": "c"}}],
            "dnsPolicy": "ClusterFirst", "activeDeadlineSeconds": 5,
            "tolerations": [
                {"operator": "Exists"},
                {"key": "a", "value": "b", "effect": "NoSchedule"},
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                    "tolerationSeconds": 300},
            ],
            "topologySpreadConstraints": [constraint],
            "containers": [{"livenessProbe": {"exec": {}, "periodSeconds": 1},
                "lifecycle": {"preStop": {"exec": {"command": ["true"]}}}}],
        });
        assert_eq!(told(spec), Vec::<String>::new());
    }
}
