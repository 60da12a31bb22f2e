//! Expressions in CEL: those of custom kinds' rules, of admission policies and of webhooks' conditions.
//!
//! An expression is compiled once. Its evaluation is bounded before it begins: expressions have no unbounded loops,
//! so its cost is at most the size of the values, raised to how deep its loops are nested, times its own size and the
//! length of the longest text that each step may read.
//! (Source: `apiserver/pkg/cel`; upstream estimates the cost of rules when a definition is written.)

mod authz;
mod libraries;
mod network;
mod quantities;

use std::{collections::HashMap as StdMap, sync::Arc};

use cel::{
    Context, Env, ExecutionError, Program, Value as CelValue,
    common::ast::{EntryExpr, Expr, IdedExpr},
    extensions,
};
use serde_json::Value;

pub(crate) use authz::{Authorizer, RequestResource};

/// The longest expression.
const EXPRESSION_BYTES_MAX: usize = 16 << 10;
/// Bytes of a text that cost one step.
const TEXT_BYTES_PER_STEP: u64 = 1024;
/// The cost of compiling a regular expression, in steps.
const REGEX_STEPS: u64 = 20;
/// Functions that expressions may call, besides operators and macros.
const FUNCTIONS: [&str; 93] = [
    "size",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "int",
    "uint",
    "double",
    "string",
    "bytes",
    "bool",
    "type",
    "dyn",
    "charAt",
    "indexOf",
    "lastIndexOf",
    "lowerAscii",
    "upperAscii",
    "replace",
    "split",
    "join",
    "substring",
    "trim",
    "format",
    "reverse",
    "distinct",
    "flatten",
    "range",
    "slice",
    "sort",
    "first",
    "last",
    "max",
    "min",
    "orValue",
    "hasValue",
    "isSorted",
    "sum",
    "find",
    "findAll",
    "url",
    "isURL",
    "getScheme",
    "getHost",
    "getHostname",
    "getPort",
    "getEscapedPath",
    "getQuery",
    "ip",
    "isIP",
    "isCanonical",
    "ip.isCanonical",
    "family",
    "isUnspecified",
    "isLoopback",
    "isLinkLocalMulticast",
    "isLinkLocalUnicast",
    "isGlobalUnicast",
    "cidr",
    "isCIDR",
    "containsIP",
    "containsCIDR",
    "masked",
    "prefixLength",
    "quantity",
    "isQuantity",
    "isInteger",
    "asInteger",
    "asApproximateFloat",
    "sign",
    "isGreaterThan",
    "isLessThan",
    "compareTo",
    "add",
    "sub",
    "path",
    "group",
    "serviceAccount",
    "resource",
    "subresource",
    "namespace",
    "name",
    "fieldSelector",
    "labelSelector",
    "check",
    "allowed",
    "reason",
    "errored",
    "error",
    "sortBy",
    "quote",
    "lists.range",
    "strings.quote",
];

/// Names of types, which are not variables.
const TYPES: [&str; 14] = [
    "int",
    "uint",
    "double",
    "string",
    "bytes",
    "bool",
    "list",
    "map",
    "null_type",
    "type",
    "dyn",
    "optional",
    "math",
    "ip",
];

/// A compiled expression.
pub(crate) struct CelExpression {
    program: Program,
    /// The variables that it reads, besides those of its own loops.
    variables: Vec<String>,
    /// The nesting depth of its macros.
    nesting: u32,
    nodes: u64,
}

impl CelExpression {
    /// Compiles an expression.
    ///
    /// # Errors
    /// Returns the reason, for the detail of a field error.
    pub(crate) fn compile(env: &Env, text: &str) -> Result<Self, String> {
        if text.len() > EXPRESSION_BYTES_MAX {
            return Err(format!("an expression may have at most {EXPRESSION_BYTES_MAX} bytes"));
        }
        let program = env.compile(text).map_err(|errors| {
            let text = errors.to_string();
            text.lines().next().unwrap_or("it cannot be parsed").to_owned()
        })?;
        let references = program.references();
        let is_operator = |name: &str| !name.starts_with(|c: char| c.is_ascii_alphabetic());
        let mut unknown: Vec<_> = references
            .functions()
            .into_iter()
            .filter(|name| !is_operator(name) && !FUNCTIONS.contains(name))
            .collect();
        unknown.sort_unstable();
        if let Some(name) = unknown.first() {
            return Err(format!("undeclared reference to {name:?} (this server has no such function)"));
        }
        let (mut nodes, mut nesting) = (0, 0);
        measure(program.expression(), 0, &mut nodes, &mut nesting);
        let (mut bound, mut variables) = (Vec::new(), Vec::new());
        free_variables(program.expression(), &mut bound, &mut variables);
        Ok(Self { program, variables, nesting, nodes })
    }

    /// Compiles an expression that may refer to no other variables than these.
    pub(crate) fn compile_with(env: &Env, text: &str, variables: &[&str]) -> Result<Self, String> {
        let compiled = Self::compile(env, text)?;
        let mut unknown = compiled.variables.clone();
        unknown.retain(|name| !variables.contains(&name.as_str()) && !TYPES.contains(&name.as_str()));
        unknown.sort_unstable();
        match unknown.first() {
            Some(name) => Err(format!("undeclared reference to '{name}' (in container '')")),
            None => Ok(compiled),
        }
    }

    pub(crate) fn reads(&self, variable: &str) -> bool {
        self.variables.iter().any(|name| name == variable)
    }

    pub(crate) fn evaluate(&self, context: &Context<'_, '_>) -> Result<CelValue, ExecutionError> {
        self.program.execute(context)
    }

    /// The maximum number of steps of an evaluation.
    pub(crate) fn cost(&self, size: u64, longest_text: u64) -> u64 {
        let steps = size.max(1).saturating_pow(self.nesting).saturating_mul(self.nodes);
        steps.saturating_mul(1 + longest_text / TEXT_BYTES_PER_STEP)
    }
}

/// Counts the nodes of an expression, and how deep comprehensions are nested.
fn measure(expression: &IdedExpr, depth: u32, nodes: &mut u64, nesting: &mut u32) {
    let called = match &expression.expr {
        Expr::Call(call) => call.func_name.as_str(),
        _ => "",
    };
    // The search of a list for an element is a loop, too.
    let depth = depth + u32::from(called == "@in" && depth > 0);
    *nodes += match called {
        "matches" => 1 + REGEX_STEPS,
        "check" => 1 + authz::CHECK_STEPS,
        _ => 1,
    };
    *nesting = (*nesting).max(depth);
    let mut below = |part: &IdedExpr, depth| measure(part, depth, nodes, nesting);
    match &expression.expr {
        Expr::Call(call) => {
            call.target.iter().map(|target| &**target).chain(&call.args).for_each(|part| below(part, depth))
        }
        Expr::Comprehension(loops) => {
            for part in [&loops.iter_range, &loops.accu_init, &loops.result] {
                below(part, depth);
            }
            for part in [&loops.loop_cond, &loops.loop_step] {
                below(part, depth + 1);
            }
        }
        Expr::List(list) => list.elements.iter().for_each(|part| below(part, depth)),
        Expr::Select(select) => below(&select.operand, depth),
        Expr::Map(map) => {
            for entry in &map.entries {
                if let EntryExpr::MapEntry(entry) = &entry.expr {
                    below(&entry.key, depth);
                    below(&entry.value, depth);
                }
            }
        }
        Expr::Struct(_) | Expr::Ident(_) | Expr::Literal(_) | Expr::Unspecified => {}
    }
}

/// Collects the variables that an expression does not bind itself.
fn free_variables<'a>(expression: &'a IdedExpr, bound: &mut Vec<&'a str>, found: &mut Vec<String>) {
    let mut each = |parts: &mut dyn Iterator<Item = &'a IdedExpr>, bound: &mut Vec<&'a str>| {
        for part in parts {
            free_variables(part, bound, found);
        }
    };
    match &expression.expr {
        Expr::Ident(name) => {
            if !bound.contains(&name.as_str()) && !found.contains(name) {
                found.push(name.clone());
            }
        }
        Expr::Call(call) => each(&mut call.target.iter().map(|target| &**target).chain(&call.args), bound),
        Expr::Comprehension(loops) => {
            each(&mut [&loops.iter_range, &loops.accu_init].into_iter(), bound);
            let own = bound.len();
            bound.extend([loops.iter_var.as_str(), loops.accu_var.as_str()]);
            bound.extend(loops.iter_var2.as_deref());
            each(&mut [&loops.loop_cond, &loops.loop_step, &loops.result].into_iter(), bound);
            bound.truncate(own);
        }
        Expr::List(list) => each(&mut list.elements.iter(), bound),
        Expr::Select(select) => each(&mut std::iter::once(&*select.operand), bound),
        Expr::Map(map) => {
            for entry in &map.entries {
                if let EntryExpr::MapEntry(entry) = &entry.expr {
                    each(&mut [&entry.key, &entry.value].into_iter(), bound);
                }
            }
        }
        Expr::Struct(_) | Expr::Literal(_) | Expr::Unspecified => {}
    }
}

/// The functions and types that all expressions have.
pub(crate) fn environment() -> Env {
    let mut env = Env::stdlib().with_optional_support(true);
    for extension in [
        extensions::strings,
        extensions::lists,
        libraries::extension,
        network::extension,
        quantities::extension,
        authz::extension,
    ] {
        let added = env.add_extension(extension);
        debug_assert!(added.is_ok(), "the extensions do not conflict");
    }
    env
}

/// An error of an evaluation, in upstream's words.
pub(crate) fn reason(error: &ExecutionError) -> String {
    match error {
        ExecutionError::NoSuchKey(key) => format!("no such key: {key}"),
        ExecutionError::FunctionError { message, .. } => message.clone(),
        other => other.to_string(),
    }
}

/// The number of values within a value.
pub(crate) fn nodes(value: &Value) -> u64 {
    match value {
        Value::Object(map) => 1 + map.values().map(nodes).sum::<u64>(),
        Value::Array(items) => 1 + items.iter().map(nodes).sum::<u64>(),
        _ => 1,
    }
}

/// The bytes of the longest text in a value.
pub(crate) fn longest_text(value: &Value) -> u64 {
    match value {
        Value::Object(map) => {
            map.iter().map(|(name, value)| longest_text(value).max(name.len() as u64)).max().unwrap_or(0)
        }
        Value::Array(items) => items.iter().map(longest_text).max().unwrap_or(0),
        Value::String(text) => text.len() as u64,
        _ => 0,
    }
}

/// The value as expressions see it: whole numbers of a field of the type `number` are doubles. The schema
/// may be null.
pub(crate) fn converted(schema: &Value, value: &Value) -> CelValue {
    match value {
        Value::Null => CelValue::Null,
        Value::Bool(value) => CelValue::Bool(*value),
        Value::Number(number) => match number.as_i64().filter(|_| schema["type"] != "number") {
            Some(number) => CelValue::Int(number),
            None => CelValue::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => CelValue::String(Arc::new(text.clone())),
        Value::Array(items) => {
            CelValue::List(Arc::new(items.iter().map(|item| converted(&schema["items"], item)).collect()))
        }
        Value::Object(map) => {
            let entries = map.iter().map(|(name, value)| {
                let inner = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                (name.clone(), converted(inner, value))
            });
            entries.collect::<StdMap<String, CelValue>>().into()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn evaluated(text: &str) -> String {
        let env = Arc::new(environment());
        let expression = match CelExpression::compile(&env, text) {
            Ok(expression) => expression,
            Err(why) => return format!("not compiled: {why}"),
        };
        match expression.evaluate(&Context::with_env(env)) {
            Ok(value) => format!("{value:?}"),
            Err(error) => format!("error: {error}"),
        }
    }

    /// The examples are those of upstream's documentation of its libraries.
    #[test]
    fn kubernetes_libraries() {
        for (text, expected) in [
            ("[1, 2, 3].isSorted()", "Bool(true)"),
            ("['b', 'a'].isSorted()", "Bool(false)"),
            ("[1, 3].sum()", "Int(4)"),
            ("[1.5, 3.0].sum()", "Float(4.5)"),
            ("[].sum()", "Int(0)"),
            ("[2, 1, 3].min()", "Int(1)"),
            ("['a', 'c', 'b'].max() == 'c'", "Bool(true)"),
            ("[1, 2, 2, 3].indexOf(2)", "Int(1)"),
            ("[1, 2, 2, 3].lastIndexOf(2)", "Int(2)"),
            ("['a'].indexOf('z')", "Int(-1)"),
            ("'tacocat'.indexOf('ac')", "Int(1)"),
            ("'abc 123'.find('[0-9]+') == '123'", "Bool(true)"),
            ("'abc'.find('[0-9]+') == ''", "Bool(true)"),
            ("'123 abc 456'.findAll('[0-9]+') == ['123', '456']", "Bool(true)"),
            ("'123 abc 456'.findAll('[0-9]+', 1) == ['123']", "Bool(true)"),
            ("isURL('https://example.com:80/path')", "Bool(true)"),
            ("isURL('../relative')", "Bool(false)"),
            ("url('https://example.com:8080/a b?k=v').getHost() == 'example.com:8080'", "Bool(true)"),
            ("url('https://[::1]:80/').getHostname() == '::1'", "Bool(true)"),
            ("url('https://example.com/a%20b').getEscapedPath() == '/a%20b'", "Bool(true)"),
            ("url('https://example.com/?k1=a&k2=b&k2=c').getQuery()['k2'] == ['b', 'c']", "Bool(true)"),
            ("url('/path').getScheme() == '' && url('/path').getHost() == ''", "Bool(true)"),
            ("isIP('127.0.0.1') && !isIP('127.0.0.01') && !isIP('::ffff:1.2.3.4')", "Bool(true)"),
            ("ip('::1').family()", "Int(6)"),
            ("ip('127.0.0.1').isLoopback()", "Bool(true)"),
            ("ip('192.168.0.1').isGlobalUnicast()", "Bool(true)"),
            ("ip('169.254.1.1').isLinkLocalUnicast()", "Bool(true)"),
            ("string(ip('10.0.0.1')) == '10.0.0.1'", "Bool(true)"),
            ("ip.isCanonical('2001:db8::abcd')", "Bool(true)"),
            ("ip.isCanonical('2001:DB8::ABCD')", "Bool(false)"),
            ("isCIDR('192.168.0.0/24') && !isCIDR('192.168.0.0/33')", "Bool(true)"),
            ("cidr('192.168.0.0/24').containsIP('192.168.0.1')", "Bool(true)"),
            ("cidr('192.168.0.0/24').containsIP(ip('192.168.1.1'))", "Bool(false)"),
            ("cidr('192.168.0.0/24').containsCIDR('192.168.0.0/25')", "Bool(true)"),
            ("cidr('192.168.0.0/24').containsCIDR(cidr('192.168.0.0/16'))", "Bool(false)"),
            ("string(cidr('192.168.1.5/16').masked()) == '192.168.0.0/16'", "Bool(true)"),
            ("cidr('::/0').prefixLength()", "Int(0)"),
            ("cidr('10.0.0.0/8').ip() == ip('10.0.0.0')", "Bool(true)"),
            ("isQuantity('1.3Gi') && !isQuantity('200K')", "Bool(true)"),
            ("quantity('200M').isInteger()", "Bool(true)"),
            ("quantity('1500m').isInteger()", "Bool(false)"),
            ("quantity('50k').asInteger()", "Int(50000)"),
            ("quantity('50k').asApproximateFloat()", "Float(50000.0)"),
            ("quantity('-5').sign()", "Int(-1)"),
            ("quantity('1Gi').isGreaterThan(quantity('1G'))", "Bool(true)"),
            ("quantity('200M').compareTo(quantity('0.2G'))", "Int(0)"),
            ("quantity('1.5').add(quantity('500m')) == quantity('2')", "Bool(true)"),
            ("quantity('50k').sub(20000) == quantity('30k')", "Bool(true)"),
            ("'%s is %d'.format(['a', 1]) == 'a is 1'", "Bool(true)"),
            ("'TacoCat'.lowerAscii().upperAscii().charAt(1) == 'A'", "Bool(true)"),
            ("['a', 'b'].join('-').replace('-', '+').split('+') == ['a', 'b']", "Bool(true)"),
            ("' x '.trim().substring(0, 1) == 'x'", "Bool(true)"),
        ] {
            assert_eq!(evaluated(text), expected, "{text}");
        }
        for (text, why) in [
            ("[].min()", "min called on empty list"),
            ("quantity('x')", "quantities must match"),
            ("ip('1.2.3')", "IP Address"),
            ("'a'.find('(')", "illegal regex"),
            ("quantity('1500m').asInteger()", "cannot convert value to integer"),
            ("'a'.getHost()", "error"),
            ("nothing('a')", "undeclared reference"),
        ] {
            let found = evaluated(text);
            assert!(found.contains(why), "{text}: {found}");
        }
    }

    #[test]
    fn only_known_variables_are_read() {
        let env = environment();
        let compiled = |text: &str| CelExpression::compile_with(&env, text, &["object", "params"]).err();
        assert_eq!(compiled("object.spec.replicas <= params.max && type(object) == map"), None);
        assert_eq!(compiled("object.items.all(item, item.x == int(1))"), None);
        let why = compiled("self.x").unwrap();
        assert_eq!(why, "undeclared reference to 'self' (in container '')");
    }
}
