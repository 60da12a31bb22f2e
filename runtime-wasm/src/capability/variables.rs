//! The environment under other interfaces: the variables of Spin applications, and the draft of `wasi:config` that
//! Spin's SDKs target.

use wasmtime::{
    StoreContextMut,
    component::{ComponentType, Lift, Linker, Lower},
};

use crate::guest::{GuestProgram, StoreData};

/// `error` of `fermyon:spin/variables@2.0.0`.
#[derive(Clone, Debug, PartialEq, Eq, ComponentType, Lift, Lower)]
#[component(variant)]
enum VariablesError {
    #[component(name = "invalid-name")]
    InvalidName(String),
    #[component(name = "undefined")]
    Undefined(String),
    #[component(name = "provider")]
    Provider(String),
    #[component(name = "other")]
    Other(String),
}

/// `error` of `wasi:config/store`.
#[derive(Clone, Debug, PartialEq, Eq, ComponentType, Lift, Lower)]
#[component(variant)]
enum StoreError {
    #[component(name = "upstream")]
    Upstream(String),
    #[component(name = "io")]
    Io(String),
}

pub(super) fn link(linker: &mut Linker<StoreData>) -> wasmtime::Result<()> {
    let mut spin = linker.instance("fermyon:spin/variables@2.0.0")?;
    spin.func_wrap("get", |store: StoreContextMut<'_, StoreData>, (name,): (String,)| {
        Ok((variable(&store.data().program, &name),))
    })?;
    let mut draft = linker.instance("wasi:config/store@0.2.0-draft-2024-09-27")?;
    draft.func_wrap("get", |store: StoreContextMut<'_, StoreData>, (key,): (String,)| {
        let found = value(&store.data().program, &key).map(str::to_owned);
        Ok((Ok::<_, StoreError>(found),))
    })?;
    draft.func_wrap("get-all", |store: StoreContextMut<'_, StoreData>, (): ()| {
        Ok((Ok::<_, StoreError>(store.data().program.env.clone()),))
    })
}

fn value<'a>(program: &'a GuestProgram, name: &str) -> Option<&'a str> {
    program.env.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

fn variable(program: &GuestProgram, name: &str) -> Result<String, VariablesError> {
    if !is_name(name) {
        let rule = "lower-case letters, digits and single underscores, a letter first";
        return Err(VariablesError::InvalidName(format!("{name:?} is not a valid variable name: {rule}")));
    }
    let undefined = || VariablesError::Undefined(format!("no environment variable {name:?} is set"));
    value(program, name).map(str::to_owned).ok_or_else(undefined)
}

/// Spin's rule for the names of variables.
fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(allowed)
        && !name.ends_with('_')
        && !name.contains("__")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_variables() {
        for name in ["a", "api_key", "a1", "a_1"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "1a", "_a", "a_", "a__b", "A", "a-b", "ä", "a b"] {
            assert!(!is_name(name), "{name}");
        }
    }
}
