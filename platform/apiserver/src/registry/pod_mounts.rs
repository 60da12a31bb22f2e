//! Validation of a container's mounts and block devices, in upstream's order and words (`pkg/apis/core/validation`,
//! `ValidateVolumeMounts` and `ValidateVolumeDevices`).

use std::collections::{HashMap, HashSet};

use mayfly_api::validation::{FieldError, FieldErrorKind};
use serde_json::Value;

use super::{pod_containers::descending_path, rules};

/// The volumes of a pod by their names.
pub(super) type PodVolumes<'v> = HashMap<&'v str, &'v Value>;

/// The rules of `volumeMounts` and `volumeDevices`. `path`: the container's.
pub(super) fn check(container: &Value, path: &str, volumes: &PodVolumes<'_>, errors: &mut Vec<FieldError>) {
    let (mounts, devices) = (&container["volumeMounts"], &container["volumeDevices"]);
    check_mounts(mounts, devices, path, volumes, errors);
    check_devices(devices, mounts, path, volumes, errors);
}

fn invalid(path: String, value: &str, detail: &str) -> FieldError {
    FieldError::invalid(path, format!("{value:?}"), detail)
}

fn not_found(path: String, name: &str) -> FieldError {
    let kind = FieldErrorKind::NotFound { value: format!("{name:?}") };
    FieldError { path, kind, detail: String::new() }
}

/// The texts in a field of a list's elements. Lists can have as many elements as fit into a request.
fn texts<'v>(list: &'v Value, field: &str) -> HashSet<&'v str> {
    rules::items(list).map(|(_, one)| rules::text(one, field)).collect()
}

fn check_mounts(
    mounts: &Value,
    devices: &Value,
    path: &str,
    volumes: &PodVolumes<'_>,
    errors: &mut Vec<FieldError>,
) {
    let (device_names, device_paths) = (texts(devices, "name"), texts(devices, "devicePath"));
    let mut known = HashSet::new();
    for (at, mount) in rules::items(mounts) {
        let path = format!("{path}.volumeMounts[{at}]");
        let (name, place) = (rules::text(mount, "name"), rules::text(mount, "mountPath"));
        if name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        }
        if !volumes.contains_key(name) {
            errors.push(not_found(format!("{path}.name"), name));
        }
        if place.is_empty() {
            errors.push(FieldError::required(format!("{path}.mountPath"), ""));
        }
        if !known.insert(place) {
            errors.push(invalid(format!("{path}.mountPath"), place, "must be unique"));
        }
        if device_names.contains(name) {
            let detail = "must not already exist in volumeDevices";
            errors.push(invalid(format!("{path}.name"), name, detail));
        }
        if device_paths.contains(place) {
            let detail = "must not already exist as a path in volumeDevices";
            errors.push(invalid(format!("{path}.mountPath"), place, detail));
        }
        for field in ["subPath", "subPathExpr"] {
            descending_path(rules::text(mount, field), &format!("{path}.{field}"), errors);
        }
        let expression = rules::text(mount, "subPathExpr");
        if !expression.is_empty() && !rules::text(mount, "subPath").is_empty() {
            let detail = "subPathExpr and subPath are mutually exclusive";
            errors.push(invalid(format!("{path}.subPathExpr"), expression, detail));
        }
    }
}

fn check_devices(
    devices: &Value,
    mounts: &Value,
    path: &str,
    volumes: &PodVolumes<'_>,
    errors: &mut Vec<FieldError>,
) {
    let (mount_names, mount_paths) = (texts(mounts, "name"), texts(mounts, "mountPath"));
    let (mut names, mut places) = (HashSet::new(), HashSet::new());
    for (at, device) in rules::items(devices) {
        let path = format!("{path}.volumeDevices[{at}]");
        let (name_path, place_path) = (format!("{path}.name"), format!("{path}.devicePath"));
        let (name, place) = (rules::text(device, "name"), rules::text(device, "devicePath"));
        if name.is_empty() {
            errors.push(FieldError::required(name_path.clone(), ""));
        } else if !names.insert(name) {
            errors.push(invalid(name_path.clone(), name, "must be unique"));
        }
        let is_claim =
            |volume: &&Value| !volume["persistentVolumeClaim"].is_null() || !volume["ephemeral"].is_null();
        match volumes.get(name) {
            None => errors.push(not_found(name_path.clone(), name)),
            Some(volume) if !is_claim(volume) => {
                let detail =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                errors.push(invalid(name_path.clone(), name, detail));
            }
            Some(_) => {}
        }
        if place.is_empty() {
            errors.push(FieldError::required(place_path.clone(), ""));
        }
        if places.contains(place) {
            errors.push(invalid(place_path.clone(), place, "must be unique"));
        }
        if place.split('/').any(|part| part == "..") {
            errors.push(invalid(place_path.clone(), place, "can not contain backsteps ('..')"));
        } else {
            places.insert(place);
        }
        if mount_names.contains(name) {
            errors.push(invalid(name_path, name, "must not already exist in volumeMounts"));
        }
        if mount_paths.contains(place) {
            let detail = "must not already exist as a path in volumeMounts";
            errors.push(invalid(place_path, place, detail));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn mounts_and_devices_are_refused_in_upstreams_words() {
        let all = json!([{"name": "v", "emptyDir": {}}, {"name": "b", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": {}}}]);
        let volumes: PodVolumes<'_> =
            rules::items(&all).map(|(_, volume)| (rules::text(volume, "name"), volume)).collect();
        let told = |container: Value| {
            let mut errors = Vec::new();
            check(&container, "c", &volumes, &mut errors);
            errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect::<Vec<_>>()
        };
        let device = |name: &str, path: &str| json!({"name": name, "devicePath": path});
        let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
        let good = json!({"volumeMounts": [mount("v", "/v")],
            "volumeDevices": [device("b", "/dev/xvda"), device("e", "/dev/xvdb")]});
        assert_eq!(told(good), Vec::<String>::new());
        for (container, expected) in [
            (
                json!({"volumeDevices": [device("", "")]}),
                &[
                    "c.volumeDevices[0].name: Required value",
                    "c.volumeDevices[0].name: Not found: \"\"",
                    "c.volumeDevices[0].devicePath: Required value",
                ][..],
            ),
            (
                json!({"volumeDevices": [device("b", "/dev/a"), device("b", "/dev/a")]}),
                &[
                    "c.volumeDevices[1].name: Invalid value: \"b\": must be unique",
                    "c.volumeDevices[1].devicePath: Invalid value: \"/dev/a\": must be unique",
                ],
            ),
            (
                json!({"volumeDevices": [device("v", "/dev/a")]}),
                &["c.volumeDevices[0].name: Invalid value: \"v\": can only use volume source type of \
                   PersistentVolumeClaim or Ephemeral for block mode"],
            ),
            (
                json!({"volumeDevices": [device("none", "/dev/a")]}),
                &["c.volumeDevices[0].name: Not found: \"none\""],
            ),
            (
                json!({"volumeDevices": [device("b", "/dev/../a")]}),
                &[
                    "c.volumeDevices[0].devicePath: Invalid value: \"/dev/../a\": can not contain backsteps ('..')",
                ],
            ),
            (
                json!({"volumeDevices": [device("b", "/data")], "volumeMounts": [mount("b", "/data")]}),
                &[
                    "c.volumeMounts[0].name: Invalid value: \"b\": must not already exist in volumeDevices",
                    "c.volumeMounts[0].mountPath: Invalid value: \"/data\": must not already exist as a path in \
                     volumeDevices",
                    "c.volumeDevices[0].name: Invalid value: \"b\": must not already exist in volumeMounts",
                    "c.volumeDevices[0].devicePath: Invalid value: \"/data\": must not already exist as a path in \
                     volumeMounts",
                ],
            ),
            (
                json!({"volumeMounts": [mount("v", "/v"), mount("v", "/v")]}),
                &["c.volumeMounts[1].mountPath: Invalid value: \"/v\": must be unique"],
            ),
            (
                json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "x", "subPathExpr": "$(X)"}]}),
                &[
                    "c.volumeMounts[0].subPathExpr: Invalid value: \"$(X)\": subPathExpr and subPath are mutually \
                   exclusive",
                ],
            ),
            (
                json!({"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "../x"}]}),
                &["c.volumeMounts[0].subPath: Invalid value: \"../x\": must not contain '..'"],
            ),
        ] {
            assert_eq!(told(container.clone()), expected, "{container}");
        }
    }
}
