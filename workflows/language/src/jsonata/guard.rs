//! Rewrites an expression so that values that can grow without bound are measured.
//!
//! Text grows by `&` and by functions; a value that repeatedly contains itself twice is small until it is printed. So
//! the operands of `&`, `$string` and similar functions are measured in advance ([`OPERAND`]), and the results of
//! functions afterwards ([`RESULT`]). Functions whose output size cannot be estimated from their operands are replaced
//! ([`JOIN`], [`PAD`]). The names contain a space, so that no expression can use them.

use std::collections::BTreeSet;

use jsonata_core::ast::{AstNode, BinaryOp, PathStep, Stage, StepId};
use jsonata_core::value::with_stack;

pub(super) const OPERAND: &str = "guarded operand";
pub(super) const RESULT: &str = "guarded result";
pub(super) const JOIN: &str = "guarded join";
pub(super) const PAD: &str = "guarded pad";
pub(super) const TEXT: &str = "guarded text of replace";
pub(super) const PICTURE: &str = "guarded picture";
/// The variable that holds the evaluation's time in milliseconds.
pub(super) const NOW: &str = "now in millis";

/// Functions whose result is a number, a boolean or a part of an operand; they are not rewritten.
const HARMLESS: [&str; 28] = [
    "abs",
    "assert",
    "average",
    "boolean",
    "ceil",
    "contains",
    "count",
    "error",
    "exists",
    "floor",
    "formatBase",
    "hash",
    "length",
    "lookup",
    "max",
    "millis",
    "min",
    "not",
    "number",
    "parseInteger",
    "power",
    "random",
    "round",
    "single",
    "sqrt",
    "sum",
    "toMillis",
    "uuid",
];

/// Functions that print their operands, possibly repeating parts.
const PRINTING: [&str; 4] = ["string", "parse", "encodeUrl", "encodeUrlComponent"];

/// Built-in functions with growing results, and the number of arguments that a higher-order function passes to them.
const BY_VALUE: [(&str, usize); 13] = [
    ("append", 2),
    ("join", 2),
    ("keys", 1),
    ("lowercase", 1),
    ("merge", 1),
    ("pad", 3),
    ("replace", 4),
    ("reverse", 1),
    ("spread", 1),
    ("split", 3),
    ("string", 1),
    ("trim", 1),
    ("uppercase", 1),
];

/// The guards that the rewriting inserted.
#[derive(Clone, Debug, Default)]
pub(super) struct Guards {
    pub(super) functions: BTreeSet<&'static str>,
    pub(super) now: bool,
}

/// The expression with its guards.
pub(super) fn rewrite(ast: AstNode) -> (AstNode, Guards) {
    let mut rewriting = Rewriting { guards: Guards::default(), loops: 0, bound: bound_names(&ast) };
    let ast = rewriting.node(ast);
    (ast, rewriting.guards)
}

struct Rewriting {
    guards: Guards,
    /// The number of enclosing steps, predicates and functions, each of which may run many times.
    loops: usize,
    /// Names the expression binds; these names are not built-in functions.
    bound: BTreeSet<String>,
}

impl Rewriting {
    fn call(&mut self, name: &'static str, args: Vec<AstNode>) -> AstNode {
        self.guards.functions.insert(name);
        AstNode::Function { name: name.to_owned(), args, is_builtin: true }
    }

    fn operand(&mut self, node: AstNode) -> AstNode {
        match node {
            literal @ (AstNode::String(_) | AstNode::Number(_) | AstNode::Boolean(_) | AstNode::Null) => {
                literal
            }
            node => self.call(OPERAND, vec![node]),
        }
    }

    fn nodes(&mut self, nodes: Vec<AstNode>) -> Vec<AstNode> {
        nodes.into_iter().map(|node| self.value(node)).collect()
    }

    fn pairs(&mut self, pairs: Vec<(AstNode, AstNode)>) -> Vec<(AstNode, AstNode)> {
        pairs.into_iter().map(|(key, value)| (self.node(key), self.value(value))).collect()
    }

    fn boxed(&mut self, node: AstNode) -> Box<AstNode> {
        Box::new(self.node(node))
    }

    /// A node whose value is retained: inside a loop, a path's new list is charged.
    fn value(&mut self, node: AstNode) -> AstNode {
        let is_path = matches!(&node, AstNode::Path { steps } if steps.len() > 1);
        let node = self.node(node);
        if is_path && self.loops > 0 { self.call(RESULT, vec![node]) } else { node }
    }

    fn looped<T>(&mut self, rewrite: impl FnOnce(&mut Self) -> T) -> T {
        self.loops += 1;
        let rewritten = rewrite(self);
        self.loops -= 1;
        rewritten
    }

    fn node(&mut self, node: AstNode) -> AstNode {
        with_stack(|| self.rewrite(node))
    }

    fn rewrite(&mut self, node: AstNode) -> AstNode {
        match node {
            AstNode::Variable(name) => self.variable(name),
            AstNode::Path { steps } => AstNode::Path {
                steps: steps.into_iter().enumerate().map(|(at, step)| self.step(at, step)).collect(),
            },
            AstNode::Binary { op, lhs, rhs } => self.binary(op, *lhs, *rhs),
            AstNode::Unary { op, operand } => AstNode::Unary { op, operand: self.boxed(*operand) },
            AstNode::Function { name, args, is_builtin } => self.function(name, args, is_builtin),
            AstNode::Call { procedure, args } => {
                AstNode::Call { procedure: self.boxed(*procedure), args: self.nodes(args) }
            }
            AstNode::Lambda { params, body, signature, thunk } => {
                let body =
                    Box::new(self.looped(|inner| if thunk { inner.node(*body) } else { inner.value(*body) }));
                AstNode::Lambda { params, body, signature, thunk }
            }
            AstNode::Array(items) => AstNode::Array(self.nodes(items)),
            AstNode::ArrayGroup(items) => AstNode::ArrayGroup(self.nodes(items)),
            AstNode::Block(items) => AstNode::Block(items.into_iter().map(|item| self.node(item)).collect()),
            AstNode::Object(pairs) => AstNode::Object(self.pairs(pairs)),
            AstNode::ObjectTransform { input, pattern } => {
                let input = self.boxed(*input);
                AstNode::ObjectTransform { input, pattern: self.looped(|inner| inner.pairs(pattern)) }
            }
            AstNode::Conditional { condition, then_branch, else_branch } => AstNode::Conditional {
                condition: self.boxed(*condition),
                then_branch: self.boxed(*then_branch),
                else_branch: else_branch.map(|branch| self.boxed(*branch)),
            },
            AstNode::FunctionApplication(inner) => {
                AstNode::FunctionApplication(Box::new(self.looped(|rewriting| rewriting.node(*inner))))
            }
            AstNode::Sort { input, terms } => {
                let input = self.boxed(*input);
                let terms =
                    terms.into_iter().map(|(term, up)| (self.looped(|inner| inner.node(term)), up)).collect();
                AstNode::Sort { input, terms }
            }
            AstNode::Transform { location, update, delete } => AstNode::Transform {
                location: self.boxed(*location),
                update: Box::new(self.looped(|inner| inner.node(*update))),
                delete: delete.map(|delete| self.boxed(*delete)),
            },
            leaf => leaf,
        }
    }

    fn step(&mut self, at: usize, step: PathStep) -> PathStep {
        let mut node =
            if at == 0 { self.node(step.node) } else { self.looped(|inner| inner.node(step.node)) };
        // `[]` requires the list of the call itself; wrapped in another call, a single item would lose the list.
        if let (AstNode::Function { name, args, .. }, false) = (&mut node, step.stages.is_empty())
            && name == RESULT
            && let Some(call) = args.pop()
        {
            node = call;
        }
        let stages = step
            .stages
            .into_iter()
            .map(|stage| match stage {
                Stage::Filter(filter) => Stage::Filter(Box::new(self.looped(|inner| inner.node(*filter)))),
                other => other,
            })
            .collect();
        PathStep { node, stages, id: StepId::default(), ..step }
    }

    fn binary(&mut self, op: BinaryOp, lhs: AstNode, rhs: AstNode) -> AstNode {
        match op {
            BinaryOp::Concatenate => {
                let lhs = self.node(lhs);
                let rhs = self.node(rhs);
                let (lhs, rhs) = (Box::new(self.operand(lhs)), Box::new(self.operand(rhs)));
                self.call(RESULT, vec![AstNode::Binary { op, lhs, rhs }])
            }
            BinaryOp::Range => {
                let (lhs, rhs) = (self.boxed(lhs), self.boxed(rhs));
                self.call(RESULT, vec![AstNode::Binary { op, lhs, rhs }])
            }
            // `x ~> $f(y)` is `$f(x, y)`.
            BinaryOp::ChainPipe => match rhs {
                AstNode::Function { name, mut args, is_builtin: true }
                    if !args.contains(&AstNode::Placeholder) =>
                {
                    args.insert(0, lhs);
                    self.function(name, args, true)
                }
                // `x ~> $f(y)[]` is `$f(x, y)[]`.
                AstNode::Path { mut steps } if matches!(steps.first(), Some(step) if is_call(&step.node)) => {
                    if let Some(PathStep { node: AstNode::Function { args, .. }, .. }) = steps.first_mut() {
                        args.insert(0, lhs);
                    }
                    self.node(AstNode::Path { steps })
                }
                rhs => AstNode::Binary { op, lhs: self.boxed(lhs), rhs: Box::new(self.node(rhs)) },
            },
            BinaryOp::ColonEqual | BinaryOp::FocusBind | BinaryOp::IndexBind => {
                AstNode::Binary { op, lhs: Box::new(lhs), rhs: self.boxed(rhs) }
            }
            _ => AstNode::Binary { op, lhs: self.boxed(lhs), rhs: self.boxed(rhs) },
        }
    }
}

impl Rewriting {
    /// A built-in function referenced without a call: if its result grows, it is replaced by a function that calls the
    /// guarded one.
    fn variable(&mut self, name: String) -> AstNode {
        let arity = BY_VALUE.iter().find(|(known, _)| *known == name).map(|(_, arity)| *arity);
        let Some(arity) = arity.filter(|_| !self.bound.contains(&name)) else {
            return AstNode::Variable(name);
        };
        let params: Vec<String> = (1..=arity).map(|at| format!("guarded {at}")).collect();
        let args = params.iter().cloned().map(AstNode::Variable).collect();
        let body = Box::new(self.function(name, args, true));
        AstNode::Lambda { params, body, signature: None, thunk: false }
    }

    fn function(&mut self, name: String, args: Vec<AstNode>, is_builtin: bool) -> AstNode {
        let is_plain = !is_builtin || self.bound.contains(&name) || args.contains(&AstNode::Placeholder);
        if is_plain {
            let args = self.nodes(args);
            return AstNode::Function { name, args, is_builtin };
        }
        if name == "replace" {
            return self.replace(args);
        }
        let is_harmless = HARMLESS.contains(&name.as_str());
        let mut args = self.nodes(args);
        match name.as_str() {
            "now" if !args.is_empty() => {
                self.guards.now = true;
                args.insert(0, AstNode::Variable(NOW.to_owned()));
                return self.pictured(args);
            }
            "fromMillis" => return self.pictured(args),
            "join" => return self.call(JOIN, args),
            "pad" => {
                args.insert(0, AstNode::Variable(String::new()));
                return self.call(PAD, args);
            }
            "string" if args.is_empty() => args.push(AstNode::Variable(String::new())),
            _ => {}
        }
        if PRINTING.contains(&name.as_str()) && !args.is_empty() {
            let first = args.remove(0);
            let first = self.operand(first);
            args.insert(0, first);
        }
        let is_ours = matches!(name.as_str(), "partition" | "range" | "parse" | "hash" | "uuid" | "eval");
        let call = AstNode::Function { name, args, is_builtin };
        if is_harmless || is_ours { call } else { self.call(RESULT, vec![call]) }
    }

    fn pictured(&mut self, args: Vec<AstNode>) -> AstNode {
        let args = args.into_iter().map(|arg| self.call(PICTURE, vec![arg])).collect();
        AstNode::Function { name: "fromMillis".to_owned(), args, is_builtin: true }
    }

    /// `$replace`: text and replacement are bound first, so that their sizes can be checked together.
    fn replace(&mut self, args: Vec<AstNode>) -> AstNode {
        let mut args = self.nodes(args);
        // With two arguments, the context is the text.
        let first = match args.len() {
            0 | 1 => return AstNode::Function { name: "replace".to_owned(), args, is_builtin: true },
            2 => 0,
            _ => 1,
        };
        let bind = |name: &str, value: AstNode| AstNode::Binary {
            op: BinaryOp::ColonEqual,
            lhs: Box::new(AstNode::Variable(name.to_owned())),
            rhs: Box::new(value),
        };
        let mut block = Vec::new();
        let mut text = AstNode::Variable(String::new());
        if first == 1 {
            text = AstNode::Variable("guarded text".to_owned());
            let given = std::mem::replace(&mut args[0], text.clone());
            let given = self.operand(given);
            block.push(bind("guarded text", given));
        }
        let pattern = match &args[first] {
            simple @ (AstNode::String(_) | AstNode::Variable(_)) => simple.clone(),
            _ => AstNode::Null,
        };
        let mut replacement = AstNode::Null;
        args[first + 1] = match std::mem::replace(&mut args[first + 1], AstNode::Null) {
            AstNode::Lambda { params, body, signature, thunk: _ } => {
                let body = Box::new(self.call(RESULT, vec![*body]));
                AstNode::Lambda { params, body, signature, thunk: false }
            }
            other => {
                replacement = AstNode::Variable("guarded replacement".to_owned());
                block.push(bind("guarded replacement", other));
                replacement.clone()
            }
        };
        block.push(self.call(TEXT, vec![text, pattern, replacement]));
        let call = AstNode::Function { name: "replace".to_owned(), args, is_builtin: true };
        block.push(self.call(RESULT, vec![call]));
        AstNode::Block(block)
    }
}

/// True for a call of a built-in function with all arguments.
fn is_call(node: &AstNode) -> bool {
    matches!(node, AstNode::Function { args, is_builtin: true, .. } if !args.contains(&AstNode::Placeholder))
}

/// All names that the expression binds: none of them is treated as a built-in function.
fn bound_names(ast: &AstNode) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    collect_bound(ast, &mut names);
    names
}

fn collect_bound(node: &AstNode, names: &mut BTreeSet<String>) {
    match node {
        AstNode::Binary { op: BinaryOp::ColonEqual, lhs, .. } => {
            if let AstNode::Variable(name) = &**lhs {
                names.insert(name.clone());
            }
        }
        AstNode::Lambda { params, .. } => names.extend(params.iter().cloned()),
        AstNode::Path { steps } => {
            for step in steps {
                names.extend([&step.focus, &step.index_var].into_iter().flatten().cloned());
            }
        }
        _ => {}
    }
    super::analysis::children(node, &mut |child| with_stack(|| collect_bound(child, names)));
}
