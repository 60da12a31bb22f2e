//! The Container Device Interface (version 1.1): files that describe a device's changes to a container.
//!
//! Supported edits: environment, device files, mounts and hooks. A device whose edits need supplementary groups,
//! `intelRdt` or network devices is refused by name, so that no container starts with a partially configured device.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use mayfly_runtime::{ContainerDevices, ContainerHook, DeviceNode, HookMoment, Mount};
use serde::Deserialize;

use crate::response;

#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CdiError {
    #[error("{0:?} is not a qualified CDI device name such as vendor.com/class=name")]
    Name(String),
    #[error("no CDI file describes {name}{}", listed(.faults))]
    Missing { name: String, faults: Vec<String> },
    #[error("CDI device {name} needs {what}, which this node does not support")]
    Unsupported { name: String, what: &'static str },
    #[error("a CDI device: {0}")]
    Device(String),
}

fn listed(list: &[String]) -> String {
    if list.is_empty() { String::new() } else { format!("; unreadable: {}", list.join("; ")) }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CdiSpec {
    #[expect(dead_code, reason = "every version up to 1.1 is read the same way")]
    cdi_version: String,
    kind: String,
    #[serde(default)]
    #[expect(dead_code, reason = "for people")]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    devices: Vec<CdiDeviceSpec>,
    #[serde(default)]
    container_edits: ContainerEdits,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CdiDeviceSpec {
    name: String,
    #[serde(default)]
    #[expect(dead_code, reason = "for people")]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    container_edits: ContainerEdits,
}

/// The changes of a container for its devices.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerEdits {
    env: Vec<String>,
    device_nodes: Vec<CdiNode>,
    mounts: Vec<CdiMount>,
    hooks: Vec<CdiHook>,
    additional_gids: Vec<u32>,
    intel_rdt: Option<serde_json::Value>,
    net_devices: Vec<serde_json::Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct CdiNode {
    path: String,
    host_path: Option<String>,
    r#type: Option<String>,
    major: Option<u32>,
    minor: Option<u32>,
    file_mode: Option<u32>,
    permissions: Option<String>,
    uid: Option<u32>,
    gid: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct CdiMount {
    host_path: String,
    container_path: String,
    r#type: Option<String>,
    options: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct CdiHook {
    hook_name: String,
    path: String,
    args: Vec<String>,
    env: Vec<String>,
    timeout: Option<i64>,
}

/// The CDI files of a node.
#[derive(Clone, Debug, Default)]
pub struct CdiSpecs {
    /// Devices by `vendor.com/class=name`, with the edits of their kind.
    devices: BTreeMap<String, (ContainerEdits, ContainerEdits)>,
    faults: Vec<String>,
}

impl CdiSpecs {
    /// Reads the `.json` and `.yaml` files of the folders; a later folder takes precedence. An unreadable file is
    /// recorded as a fault, which is reported by the error of a container whose device is missing.
    pub fn load(folders: &[PathBuf]) -> Self {
        let mut specs = Self::default();
        for folder in folders {
            match files(folder) {
                Ok(files) => files.iter().for_each(|path| specs.add_file(path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => specs.faults.push(format!("{}: {error}", folder.display())),
            }
        }
        specs
    }

    fn add_file(&mut self, path: &Path) {
        let text = fs::read_to_string(path).map_err(|error| error.to_string());
        if let Err(error) = text.and_then(|text| self.add(&text)) {
            self.faults.push(format!("{}: {error}", path.display()));
        }
    }

    /// Adds one file's devices. JSON is a subset of YAML.
    fn add(&mut self, text: &str) -> Result<(), String> {
        let spec: CdiSpec = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        for device in spec.devices {
            let name = format!("{}={}", spec.kind, device.name);
            self.devices.insert(name, (spec.container_edits.clone(), device.container_edits));
        }
        Ok(())
    }

    /// The edits for the devices: the edits of each kind once, then those of each device.
    ///
    /// # Errors
    /// A device is not described, or needs unsupported edits.
    pub fn edits(&self, names: &[String]) -> Result<ContainerEdits, CdiError> {
        let mut edits = ContainerEdits::default();
        let mut kinds: Vec<&str> = Vec::new();
        for name in names {
            let (kind, _) = name
                .split_once('=')
                .filter(|(kind, device)| kind.contains('/') && !device.is_empty())
                .ok_or_else(|| CdiError::Name(name.clone()))?;
            let (of_kind, of_device) = self
                .devices
                .get(name)
                .ok_or_else(|| CdiError::Missing { name: name.clone(), faults: self.faults.clone() })?;
            for what in [of_kind, of_device] {
                what.supported(name)?;
            }
            if !kinds.contains(&kind) {
                kinds.push(kind);
                edits.append(of_kind);
            }
            edits.append(of_device);
        }
        Ok(edits)
    }
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "json" || extension == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

impl ContainerEdits {
    fn supported(&self, name: &str) -> Result<(), CdiError> {
        let what = if self.hooks.iter().any(|hook| hook.moment().is_none()) {
            "a hook with an unknown name"
        } else if self.intel_rdt.is_some() {
            "intelRdt"
        } else if !self.net_devices.is_empty() {
            "network devices"
        } else if !self.additional_gids.is_empty() {
            "supplementary groups"
        } else {
            return Ok(());
        };
        Err(CdiError::Unsupported { name: name.to_owned(), what })
    }

    fn append(&mut self, other: &Self) {
        self.env.extend(other.env.iter().cloned());
        self.device_nodes.extend(other.device_nodes.iter().cloned());
        self.mounts.extend(other.mounts.iter().cloned());
        self.hooks.extend(other.hooks.iter().cloned());
    }

    /// Adds the edits to those of plugins; a variable, mount or device file of the same name is replaced.
    ///
    /// # Errors
    /// A device file without numbers does not exist.
    pub fn apply(&self, devices: &mut ContainerDevices) -> Result<(), CdiError> {
        for line in &self.env {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            devices.env.insert(name.to_owned(), value.to_owned());
        }
        for mount in &self.mounts {
            devices.mounts.retain(|known| known.guest != mount.container_path);
            devices.mounts.push(Mount {
                host: mount.host_path.clone().into(),
                guest: mount.container_path.clone(),
                read_only: mount.options.iter().any(|option| option == "ro"),
                ..Mount::default()
            });
        }
        for node in &self.device_nodes {
            devices.nodes.retain(|known| known.path != node.path);
            devices.nodes.push(node.resolve().map_err(CdiError::Device)?);
        }
        let hook = |hook: &CdiHook| {
            Some(ContainerHook {
                moment: hook.moment()?,
                path: hook.path.clone(),
                args: hook.args.clone(),
                env: hook.env.clone(),
                timeout_s: hook.timeout,
            })
        };
        devices.hooks.extend(self.hooks.iter().filter_map(hook));
        Ok(())
    }
}

impl CdiHook {
    fn moment(&self) -> Option<HookMoment> {
        HookMoment::ALL.into_iter().find(|moment| moment.name() == self.hook_name)
    }
}

impl CdiNode {
    fn resolve(&self) -> Result<DeviceNode, String> {
        let access = self.permissions.clone().unwrap_or_else(|| "rwm".into());
        let host = self.host_path.as_ref().unwrap_or(&self.path);
        let found = match (self.major, self.minor) {
            (Some(major), Some(minor)) => DeviceNode {
                path: self.path.clone(),
                block: self.r#type.as_deref() == Some("b"),
                major,
                minor,
                access,
                mode: None,
                uid: None,
                gid: None,
            },
            _ => response::node(host, self.path.clone(), access)?,
        };
        Ok(DeviceNode {
            mode: self.file_mode.or(found.mode),
            uid: self.uid.or(found.uid),
            gid: self.gid.or(found.gid),
            ..found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATIC: &str = r#"{"cdiVersion": "0.6.0", "kind": "vendor.com/gpu",
        "containerEdits": {"env": ["VENDOR=1"], "mounts": [
            {"hostPath": "/usr/lib/v.so", "containerPath": "/usr/lib/v.so", "options": ["ro", "bind"]}]},
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/v0", "hostPath": "/dev/null"}]}},
            {"name": "1", "containerEdits": {"deviceNodes": [
                {"path": "/dev/v1", "type": "b", "major": 7, "minor": 1, "permissions": "r", "fileMode": 416}]}},
            {"name": "hooked", "containerEdits": {"hooks": [
                {"hookName": "createContainer", "path": "/bin/x", "args": ["x", "ldcache"], "env": ["B=2"]}]}},
            {"name": "strange", "containerEdits": {"hooks": [{"hookName": "later", "path": "/bin/x"}]}}]}"#;
    const DYNAMIC: &str = "cdiVersion: 1.1.0\nkind: vendor.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    env: [FROM=run]\n";

    fn load(files: &[(&str, &str)]) -> (CdiSpecs, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let folders = ["etc", "run"].map(|name| folder.path().join(name));
        folders.iter().for_each(|folder| fs::create_dir(folder).unwrap());
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        (CdiSpecs::load(&folders), folder)
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn edits_of_kind_and_devices_are_merged() {
        let (specs, _folder) = load(&[("etc/v.json", STATIC)]);
        let mut devices = ContainerDevices::default();
        let asked = names(&["vendor.com/gpu=0", "vendor.com/gpu=1"]);
        specs.edits(&asked).unwrap().apply(&mut devices).unwrap();
        assert_eq!(devices.env, [("VENDOR".to_owned(), "1".to_owned())].into());
        let lib = Mount {
            host: "/usr/lib/v.so".into(),
            guest: "/usr/lib/v.so".into(),
            read_only: true,
            ..Mount::default()
        };
        assert_eq!(devices.mounts, [lib]);
        let nodes: Vec<_> = devices
            .nodes
            .iter()
            .map(|node| (node.path.as_str(), node.block, node.major, node.minor, node.access.as_str()))
            .collect();
        assert_eq!(nodes, [("/dev/v0", false, 1, 3, "rwm"), ("/dev/v1", true, 7, 1, "r")]);
        assert_eq!(devices.nodes[1].mode, Some(416));
    }

    #[test]
    fn hooks_are_handed_on() {
        let (specs, _folder) = load(&[("etc/v.json", STATIC)]);
        let mut devices = ContainerDevices::default();
        specs.edits(&names(&["vendor.com/gpu=hooked"])).unwrap().apply(&mut devices).unwrap();
        let hook = ContainerHook {
            moment: HookMoment::CreateContainer,
            path: "/bin/x".into(),
            args: names(&["x", "ldcache"]),
            env: names(&["B=2"]),
            timeout_s: None,
        };
        assert_eq!(devices.hooks, [hook]);
    }

    #[test]
    fn the_dynamic_folder_is_stronger() {
        let (specs, _folder) = load(&[("etc/v.json", STATIC), ("run/v.yaml", DYNAMIC)]);
        let mut devices = ContainerDevices::default();
        specs.edits(&names(&["vendor.com/gpu=0"])).unwrap().apply(&mut devices).unwrap();
        assert_eq!(devices.env, [("FROM".to_owned(), "run".to_owned())].into());
    }

    #[test]
    fn faults_are_told() {
        let (specs, _folder) =
            load(&[("etc/v.json", STATIC), ("etc/w.json", r#"{"kind": "w", "novel": 1}"#)]);
        let refused = |name: &str| specs.edits(&names(&[name])).unwrap_err();
        assert_eq!(refused("gpu0"), CdiError::Name("gpu0".into()));
        let strange = refused("vendor.com/gpu=strange").to_string();
        assert!(strange.contains("a hook with an unknown name"), "{strange}");
        let missing = refused("vendor.com/gpu=9").to_string();
        assert!(missing.contains("vendor.com/gpu=9") && missing.contains("w.json"), "{missing}");
    }
}
