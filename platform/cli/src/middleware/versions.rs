//! Versions of interfaces in components that are linked: all refer to the newest compatible version of an interface.
//!
//! Tool chains contain different patch versions of WASI, and linking compares names with their versions. A later patch
//! version only adds to an interface, so a component that was built for an earlier one works with it.

use std::collections::BTreeMap;

use anyhow::Result;
use wasm_encoder::{
    Component, ComponentExportSection, ComponentImportSection, RawSection,
    reencode::{ReencodeComponent as _, RoundtripReencoder},
};
use wasmparser::{Parser, Payload};

/// The newest version of every interface that some components import or export.
#[derive(Debug, Default)]
pub(super) struct NewestVersions(NewestNames);

/// By interface and version line (`wasi:http/types@0.2`): the newest version's numbers, and the name with it.
type NewestNames = BTreeMap<String, (Numbers, String)>;

/// The numbers of a version in which versions of one line differ.
type Numbers = [u64; 2];

impl NewestVersions {
    /// Includes a component's interfaces.
    ///
    /// # Errors
    /// The content is not a component that can be parsed.
    pub(super) fn add(&mut self, component: &[u8]) -> Result<()> {
        let InterfaceNames { imports, exports } = InterfaceNames::of(component)?;
        for name in imports.into_iter().chain(exports) {
            keep_newest(&mut self.0, name);
        }
        Ok(())
    }

    /// A component whose imports and exports have the newest versions. Of several versions of one line that the
    /// component itself imports, only the newest is renamed: an import's name must be unique.
    ///
    /// # Errors
    /// The content is not a component that can be parsed.
    pub(super) fn applied(&self, component: &[u8]) -> Result<Vec<u8>> {
        let InterfaceNames { imports, exports } = InterfaceNames::of(component)?;
        let (imports, exports) = (self.renamed(imports), self.renamed(exports));
        if imports.is_empty() && exports.is_empty() {
            return Ok(component.to_vec());
        }
        rename(component, &imports, &exports)
    }

    /// The names that change, with their new versions.
    fn renamed(&self, names: Vec<String>) -> BTreeMap<String, String> {
        let mut own = NewestNames::new();
        for name in names {
            keep_newest(&mut own, name);
        }
        let newest =
            own.into_iter().filter_map(|(line, (_, name))| Some((name, self.0.get(&line)?.1.clone())));
        newest.filter(|(name, newest)| name != newest).collect()
    }
}

fn keep_newest(newest: &mut NewestNames, name: String) {
    let Some((line, numbers)) = version_line(&name) else { return };
    match newest.get(&line) {
        Some((known, _)) if *known >= numbers => {}
        _ => {
            newest.insert(line, (numbers, name));
        }
    }
}

/// An interface with the part of its version that compatible versions share, and the remaining numbers; `None` for a
/// name without a version, a pre-release and 0.0.x, which are compatible with nothing else.
fn version_line(name: &str) -> Option<(String, Numbers)> {
    let (interface, version) = name.split_once('@')?;
    let numbers: Option<Vec<u64>> = version.split('.').map(|number| number.parse().ok()).collect();
    match numbers?.as_slice() {
        [0, 0, _] => None,
        [0, minor, patch] => Some((format!("{interface}@0.{minor}"), [*patch, 0])),
        [major, minor, patch] => Some((format!("{interface}@{major}"), [*minor, *patch])),
        _ => None,
    }
}

/// The names of a component's imports and exports.
#[derive(Default)]
struct InterfaceNames {
    imports: Vec<String>,
    exports: Vec<String>,
}

impl InterfaceNames {
    fn of(component: &[u8]) -> Result<Self> {
        let mut names = Self::default();
        outermost(component, |payload| {
            match payload {
                Payload::ComponentImportSection(section) => {
                    for import in section {
                        names.imports.push(import?.name.name.to_owned());
                    }
                }
                Payload::ComponentExportSection(section) => {
                    for export in section {
                        names.exports.push(export?.name.name.to_owned());
                    }
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(names)
    }
}

/// Replaces names of imports and exports. Types refer to each other by index, so that nothing else changes.
fn rename(
    component: &[u8],
    imports: &BTreeMap<String, String>,
    exports: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let mut changed = Component::new();
    outermost(component, |payload| {
        match payload {
            Payload::ComponentImportSection(section) => {
                let mut renamed = ComponentImportSection::new();
                for import in section {
                    let mut import = import?;
                    import.name.name = imports.get(import.name.name).map_or(import.name.name, String::as_str);
                    renamed.import(import.name, RoundtripReencoder.component_type_ref(import.ty)?);
                }
                changed.section(&renamed);
            }
            Payload::ComponentExportSection(section) => {
                let mut renamed = ComponentExportSection::new();
                for export in section {
                    let mut export = export?;
                    export.name.name = exports.get(export.name.name).map_or(export.name.name, String::as_str);
                    RoundtripReencoder.parse_component_export(&mut renamed, export)?;
                }
                changed.section(&renamed);
            }
            payload => {
                if let Some((id, range)) = payload.as_section() {
                    changed.section(&RawSection { id, data: &component[range] });
                }
            }
        }
        Ok(())
    })?;
    Ok(changed.finish())
}

/// Visits the sections of the outermost component; a nested module or component is one section.
fn outermost<'a>(component: &'a [u8], mut visit: impl FnMut(Payload<'a>) -> Result<()>) -> Result<()> {
    let mut depth = 0u32;
    for payload in Parser::new(0).parse_all(component) {
        let payload = payload?;
        let is_nested = matches!(payload, Payload::ModuleSection { .. } | Payload::ComponentSection { .. });
        let ends = matches!(payload, Payload::End(_));
        if depth == 0 {
            visit(payload)?;
        }
        if is_nested {
            depth += 1;
        } else if ends {
            depth = depth.saturating_sub(1);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_one_line_are_compatible() {
        for (name, expected) in [
            ("wasi:http/types@0.2.12", Some(("wasi:http/types@0.2", [12, 0]))),
            ("wasi:http/handler@0.3.0", Some(("wasi:http/handler@0.3", [0, 0]))),
            ("a:b/c@2.1.3", Some(("a:b/c@2", [1, 3]))),
            ("a:b/c@0.0.3", None),
            ("wasi:http/handler@0.3.0-rc-2026-01-01", None),
            ("a:b/c", None),
            ("handle", None),
        ] {
            let expected = expected.map(|(line, numbers)| (line.to_owned(), numbers));
            assert_eq!(version_line(name), expected, "{name}");
        }
    }

    /// Imports and exports by name, with a nested component that has the same names.
    fn component(imports: &[&str], exports: &[&str]) -> Vec<u8> {
        let imported: String =
            imports.iter().map(|name| format!(r#"(import "{name}" (instance))"#)).collect();
        let exported: String =
            exports.iter().map(|name| format!(r#"(export "{name}" (instance $empty))"#)).collect();
        let text = format!(
            r#"(component (component {imported}) {imported}
                (core module $nested (func (export "f")))
                (component $none) (instance $empty (instantiate $none)) {exported})"#
        );
        wat::parse_str(text).unwrap()
    }

    #[test]
    fn names_get_the_newest_version_of_all_components() {
        let components = [
            component(&["a:b/c@0.2.3", "a:b/d@0.2.9"], &["a:b/h@0.2.3"]),
            component(&["a:b/c@0.2.12", "a:b/d@0.3.0", "a:b/h@0.2.10"], &["a:b/h@0.2.10"]),
        ];
        let mut versions = NewestVersions::default();
        for component in &components {
            versions.add(component).unwrap();
        }
        for (component, imports, exports) in [
            (&components[0], &["a:b/c@0.2.12", "a:b/d@0.2.9"][..], ["a:b/h@0.2.10"]),
            (&components[1], &["a:b/c@0.2.12", "a:b/d@0.3.0", "a:b/h@0.2.10"], ["a:b/h@0.2.10"]),
        ] {
            let applied = versions.applied(component).unwrap();
            wasmparser::validate(&applied).unwrap();
            let names = InterfaceNames::of(&applied).unwrap();
            assert_eq!(
                (names.imports.as_slice(), names.exports.as_slice()),
                (&*owned(imports), &*owned(&exports))
            );
        }
        // Nothing to rename.
        assert_eq!(versions.applied(&components[1]).unwrap(), components[1]);
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn of_two_versions_in_one_component_the_newer_is_renamed() {
        let both = component(&["a:b/c@0.2.0", "a:b/c@0.2.3"], &[]);
        let mut versions = NewestVersions::default();
        versions.add(&both).unwrap();
        versions.add(&component(&["a:b/c@0.2.6"], &[])).unwrap();
        let applied = versions.applied(&both).unwrap();
        wasmparser::validate(&applied).unwrap();
        assert_eq!(InterfaceNames::of(&applied).unwrap().imports, owned(&["a:b/c@0.2.0", "a:b/c@0.2.6"]));
    }

    #[test]
    fn other_content_is_an_error() {
        assert!(NewestVersions::default().add(b"\0asm\x0d\0\x01\0\x07").is_err());
    }
}
