//! Links middleware in front of a handler: components that export the handler's HTTP interface and import it for the
//! next component. The result is one component, run by one instance: a call to the next component is a call within it.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use mayfly_runtime::component::inspect;
use wasm_compose::graph::{Component, CompositionGraph, EncodeOptions, ExportIndex, InstanceId};
use wasmparser::{Validator, WasmFeatures};

use self::versions::NewestVersions;
use super::{
    bounded_read::{self, CONTENT_BYTES_MAX},
    component,
    failure::{ErrorCode, Failure},
};

mod versions;

/// The number of middleware components of one function: each adds its memory to every instance.
const MIDDLEWARE_MAX: usize = 16;

/// Interfaces through which a handler receives requests, without versions.
const HANDLERS: [&str; 2] = ["wasi:http/incoming-handler", "wasi:http/handler"];

/// Reads the middleware and links it in front of a handler. The first file receives a request first.
pub(crate) fn link(handler: Bytes, files: &[PathBuf]) -> anyhow::Result<Bytes> {
    if files.is_empty() {
        return Ok(handler);
    }
    if files.len() > MIDDLEWARE_MAX {
        let what =
            format!("{} middleware components, and a function has at most {MIDDLEWARE_MAX}", files.len());
        return Err(Failure::error(ErrorCode::Usage, what, "link those that belong together beforehand"));
    }
    let mut chain = Vec::with_capacity(files.len());
    for path in files {
        // Not checked by the rules for functions: middleware imports interfaces that the next component provides, not
        // the host.
        let content = bounded_read::file(path, CONTENT_BYTES_MAX).map_err(|error| {
            let what = format!("cannot read {}: {error}", path.display());
            Failure::error(ErrorCode::FileError, what, "name the .wasm file of a middleware component")
        })?;
        chain.push((path.as_path(), component::of_content(content, path)?));
    }
    let linked = compose(&handler, &chain)?;
    inspect(&linked).map_err(|refused| {
        let todo = "deploy the handler without --middleware to see whether it is the cause";
        Failure::error(
            ErrorCode::InvalidFile,
            format!("the handler with its middleware cannot be deployed: {refused}"),
            todo,
        )
    })?;
    Ok(linked.into())
}

/// Links from the handler outwards: each middleware's import is satisfied by the export of the component behind it.
fn compose(handler: &[u8], chain: &[(&Path, Bytes)]) -> anyhow::Result<Vec<u8>> {
    let (handler, chain) = of_one_version(handler, chain)?;
    compose_by_name(&handler, &chain)
}

/// The same components, with compatible versions of an interface replaced by the newest of them.
fn of_one_version<'a>(
    handler: &[u8],
    chain: &[(&'a Path, Bytes)],
) -> anyhow::Result<(Vec<u8>, Vec<(&'a Path, Vec<u8>)>)> {
    let mut versions = NewestVersions::default();
    versions.add(handler).map_err(|error| cannot_link("the handler", &error))?;
    for (path, content) in chain {
        versions.add(content).map_err(|error| cannot_link(&path.display().to_string(), &error))?;
    }
    let applied = |(path, content): &(&'a Path, Bytes)| anyhow::Ok((*path, versions.applied(content)?));
    Ok((versions.applied(handler)?, chain.iter().map(applied).collect::<anyhow::Result<_>>()?))
}

/// Links components whose imports and exports have equal names.
fn compose_by_name(handler: &[u8], chain: &[(&Path, Vec<u8>)]) -> anyhow::Result<Vec<u8>> {
    let mut graph = CompositionGraph::new();
    // One validator for all: the types of components are compared, and a type belongs to its validator.
    let mut validator = Validator::new_with_features(WasmFeatures::default() | WasmFeatures::CM_ASYNC);
    let inner = add(&mut graph, &mut validator, "handler", handler)
        .map_err(|error| cannot_link("the handler", &error))?;
    let interface = exported(&graph, inner).ok_or_else(|| {
        Failure::new(
            ErrorCode::InvalidFile,
            "the handler exports no interface of wasi:http",
            "deploy a component that answers requests",
        )
    })?;
    let mut next = Link { instance: inner, interface };
    for (index, (path, content)) in chain.iter().enumerate().rev() {
        let instance = add(&mut graph, &mut validator, &format!("middleware{index}"), content)
            .map_err(|error| cannot_link(&path.display().to_string(), &error))?;
        next = connect(&mut graph, path, instance, &next)?;
    }
    // The result is validated afterwards, with the host's features.
    let options = EncodeOptions { define_components: true, export: Some(next.instance), validate: false };
    graph.encode(options).map_err(|error| cannot_link("the components", &error))
}

/// The component that receives the next call, and the name of the interface that it exports for that.
struct Link {
    instance: InstanceId,
    interface: String,
}

fn add<'a>(
    graph: &mut CompositionGraph<'a>,
    validator: &mut Validator,
    name: &str,
    content: &'a [u8],
) -> anyhow::Result<InstanceId> {
    let component = Component::from_bytes(validator, name, content)?;
    let id = graph.add_component(component)?;
    graph.instantiate(id)
}

fn exported(graph: &CompositionGraph<'_>, instance: InstanceId) -> Option<String> {
    let (_, component) = graph.get_component_of_instance(instance)?;
    let mut names = component.exports().map(|(_, name, ..)| name);
    names.find(|name| is_handler(name)).map(str::to_owned)
}

fn is_handler(name: &str) -> bool {
    name.split_once('@').is_some_and(|(interface, _)| HANDLERS.contains(&interface))
}

fn connect(
    graph: &mut CompositionGraph<'_>,
    path: &Path,
    outer: InstanceId,
    next: &Link,
) -> anyhow::Result<Link> {
    let path = path.display();
    let export: Option<ExportIndex> = graph
        .get_component_of_instance(next.instance)
        .and_then(|(_, component)| component.export_by_name(&next.interface))
        .map(|(index, ..)| index);
    let (_, component) = graph.get_component_of_instance(outer).ok_or_else(|| missing(&path))?;
    let Some((import, _)) = component.import_by_name(&next.interface) else {
        let imported = component.imports().map(|(_, name, _)| name).find(|name| is_handler(name));
        let what = match imported {
            Some(name) => {
                format!("{path} calls {name}, and the component behind it exports {}", next.interface)
            }
            None => format!("{path} is not middleware: it imports no HTTP handler to pass requests on to"),
        };
        let todo = format!("build it against a world that imports and exports {}", next.interface);
        return Err(Failure::error(ErrorCode::InvalidFile, what, todo));
    };
    let interface = exported(graph, outer).ok_or_else(|| missing(&path))?;
    graph
        .connect(next.instance, export, outer, import)
        .map_err(|error| cannot_link(&path.to_string(), &error))?;
    Ok(Link { instance: outer, interface })
}

fn missing(path: &impl std::fmt::Display) -> anyhow::Error {
    Failure::error(
        ErrorCode::InvalidFile,
        format!("{path} exports no HTTP handler"),
        "name a component that answers requests",
    )
}

fn cannot_link(what: &str, error: &anyhow::Error) -> anyhow::Error {
    Failure::error(
        ErrorCode::InvalidFile,
        format!("cannot link {what}: {error:#}"),
        "the handler and its middleware must be components built for compatible versions of wasi:http",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The resources of `wasi:http/types` that a handler is called with, and other ones.
    fn types(version: &str, others: &[&str]) -> String {
        let others: String =
            others.iter().map(|name| format!(r#"(export "{name}" (type (sub resource)))"#)).collect();
        format!(
            r#"(import "wasi:http/types@{version}" (instance $types {others}
                (export "incoming-request" (type (sub resource)))
                (export "response-outparam" (type (sub resource)))))
            (alias export $types "incoming-request" (type $request))
            (alias export $types "response-outparam" (type $out))"#
        )
    }

    /// Exports a request handler interface of this version.
    fn handler(version: &str) -> Vec<u8> {
        wat::parse_str(format!(
            r#"(component {}
                (core module $m (func (export "handle") (param i32 i32)))
                (core instance $i (instantiate $m))
                (func $handle (param "request" (own $request)) (param "response-out" (own $out))
                    (canon lift (core func $i "handle")))
                (instance $handler (export "handle" (func $handle)))
                (export "wasi:http/incoming-handler@{version}" (instance $handler)))"#,
            types(version, &[])
        ))
        .unwrap()
    }

    /// Forwards every request.
    fn middleware(version: &str) -> Bytes {
        let name = format!("wasi:http/incoming-handler@{version}");
        let text = format!(
            r#"(component {}
                (import "{name}" (instance $next
                    (alias outer 1 $request (type $request))
                    (alias outer 1 $out (type $out))
                    (export "handle"
                        (func (param "request" (own $request)) (param "response-out" (own $out))))))
                (export "{name}" (instance $next)))"#,
            types(version, &["fields"])
        );
        wat::parse_str(text).unwrap().into()
    }

    fn linked(handler: &[u8], chain: &[(&str, Bytes)]) -> Result<Vec<u8>, String> {
        let chain: Vec<_> = chain.iter().map(|(path, content)| (Path::new(*path), content.clone())).collect();
        compose(handler, &chain).map_err(|error| error.to_string())
    }

    #[test]
    fn a_chain_exports_the_handler_and_imports_none() {
        let chain = [("a.wasm", middleware("0.2.6")), ("b.wasm", middleware("0.2.6"))];
        let report = inspect(&linked(&handler("0.2.6"), &chain).unwrap()).unwrap();
        assert_eq!(report.exports, ["wasi:http/incoming-handler@0.2.6"]);
        assert_eq!(report.imports, ["wasi:http/types@0.2.6"]);
    }

    #[test]
    fn patch_versions_of_one_interface_are_linked_both_ways_round() {
        for (inner, outer, newest) in
            [("0.2.10", "0.2.12", "0.2.12"), ("0.2.12", "0.2.10", "0.2.12"), ("0.2.6", "0.2.0", "0.2.6")]
        {
            let chain = [("a.wasm", middleware(outer)), ("b.wasm", middleware(inner))];
            let report = inspect(&linked(&handler(inner), &chain).unwrap()).unwrap();
            assert_eq!(report.exports, [format!("wasi:http/incoming-handler@{newest}")], "{inner} {outer}");
            assert_eq!(report.imports, [format!("wasi:http/types@{newest}")], "{inner} {outer}");
        }
    }

    #[test]
    fn what_cannot_be_linked_is_refused_by_name() {
        let said = linked(&handler("0.2.6"), &[("old.wasm", middleware("0.1.0"))]).unwrap_err();
        assert!(said.contains("old.wasm calls wasi:http/incoming-handler@0.1.0"), "{said}");
        assert!(said.contains("exports wasi:http/incoming-handler@0.2.6"), "{said}");
        let said = linked(&handler("0.2.6"), &[("plain.wasm", handler("0.2.6").into())]).unwrap_err();
        assert!(said.contains("plain.wasm is not middleware"), "{said}");
    }

    #[test]
    fn middleware_is_limited_in_number() {
        let files = vec![PathBuf::from("a.wasm"); MIDDLEWARE_MAX + 1];
        let said = link(handler("0.2.6").into(), &files).unwrap_err().to_string();
        assert!(said.contains("at most 16"), "{said}");
        let alone = handler("0.2.6");
        assert_eq!(link(alone.clone().into(), &[]).unwrap(), alone);
    }
}
