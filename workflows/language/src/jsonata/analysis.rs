//! Finds the references of an expression (variables, members of `$states`, functions), and checks AWS's restrictions.

use std::collections::BTreeSet;

use jsonata_core::ast::{AstNode, BinaryOp, PathStep, Stage};

/// The references of an expression.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    /// Free variables other than `$states`.
    pub(crate) variables: BTreeSet<String>,
    pub(crate) states: StatesUse,
    /// The referenced members of `$states`.
    pub(crate) members: BTreeSet<String>,
    /// Names of functions that the expression calls or references but does not define.
    pub(crate) functions: BTreeSet<String>,
    /// Names of functions called, built-in or user-defined.
    pub(crate) called: BTreeSet<String>,
    /// The comparison operators of the expression, for error messages.
    pub(crate) comparisons: BTreeSet<&'static str>,
    /// A violation of AWS's restrictions.
    pub(crate) problem: Option<String>,
}

/// The members of `$states` that are read; only these are converted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StatesUse {
    pub(crate) input: bool,
    pub(crate) result: bool,
    pub(crate) error_output: bool,
    pub(crate) context: bool,
}

impl StatesUse {
    const ALL: Self = Self { input: true, result: true, error_output: true, context: true };

    pub(crate) fn any(self) -> bool {
        self.input || self.result || self.error_output || self.context
    }
}

impl Uses {
    /// The called function, if the expression calls exactly one.
    pub(super) fn only_function(&self) -> Option<&str> {
        let mut called = self.called.iter();
        called.next().map(String::as_str).filter(|_| called.next().is_none())
    }

    /// The comparison operator, if the expression has exactly one.
    pub(super) fn only_comparison(&self) -> Option<&'static str> {
        let mut operators = self.comparisons.iter();
        operators.next().copied().filter(|_| operators.next().is_none())
    }

    pub(crate) fn of(ast: &AstNode) -> Self {
        let mut walk = Walk { uses: Self::default(), bound: Vec::new(), inside: 0 };
        walk.node(ast);
        walk.uses
    }
}

/// The source text of an ordering operator.
pub(super) fn comparison(op: BinaryOp) -> Option<&'static str> {
    match op {
        BinaryOp::LessThan => Some("<"),
        BinaryOp::LessThanOrEqual => Some("<="),
        BinaryOp::GreaterThan => Some(">"),
        BinaryOp::GreaterThanOrEqual => Some(">="),
        _ => None,
    }
}

/// The maximum number of nodes of a cheap expression.
const LIGHT_NODES_MAX: usize = 200;

/// Functions whose time is linear in their operands.
const LIGHT_FUNCTIONS: [&str; 39] = [
    "abs",
    "append",
    "average",
    "base64decode",
    "base64encode",
    "boolean",
    "ceil",
    "contains",
    "count",
    "error",
    "exists",
    "floor",
    "formatNumber",
    "fromMillis",
    "hash",
    "join",
    "keys",
    "length",
    "lookup",
    "lowercase",
    "max",
    "merge",
    "millis",
    "min",
    "not",
    "now",
    "number",
    "parse",
    "random",
    "round",
    "string",
    "substring",
    "substringAfter",
    "substringBefore",
    "sum",
    "trim",
    "type",
    "uppercase",
    "uuid",
];

/// Whether an expression is cheap: no function definitions, no loops except those of paths, no variable bindings, no
/// regular expressions, and only linear functions.
pub(super) fn is_light(ast: &AstNode) -> bool {
    let mut nodes = 0;
    light(ast, &mut nodes)
}

fn light(node: &AstNode, nodes: &mut usize) -> bool {
    *nodes += 1;
    let is_light = match node {
        AstNode::Lambda { .. }
        | AstNode::Call { .. }
        | AstNode::Regex { .. }
        | AstNode::Descendant
        | AstNode::Parent(_)
        | AstNode::Sort { .. }
        | AstNode::Transform { .. }
        | AstNode::ObjectTransform { .. }
        | AstNode::Placeholder => false,
        AstNode::Binary { op, .. } => !matches!(
            op,
            BinaryOp::Range
                | BinaryOp::ColonEqual
                | BinaryOp::ChainPipe
                | BinaryOp::In
                | BinaryOp::FocusBind
                | BinaryOp::IndexBind
        ),
        AstNode::Function { name, .. } => LIGHT_FUNCTIONS.contains(&name.as_str()),
        _ => true,
    };
    if !is_light || *nodes > LIGHT_NODES_MAX {
        return false;
    }
    let mut all = true;
    children(node, &mut |child| all = all && light(child, nodes));
    all
}

/// Traverses the tree, tracking the bound names.
struct Walk {
    uses: Uses,
    bound: Vec<String>,
    /// The number of enclosing steps and predicates: inside them `$` is the current item, outside it is undefined.
    inside: usize,
}

impl Walk {
    fn node(&mut self, node: &AstNode) {
        match node {
            AstNode::Variable(name) => self.variable(name),
            AstNode::Path { steps } => self.path(steps),
            AstNode::Binary { op, lhs, rhs } => self.binary(*op, lhs, rhs),
            AstNode::Unary { operand, .. } => self.node(operand),
            AstNode::Function { name, args, .. } => {
                self.function(name);
                self.nodes(args);
            }
            AstNode::ParentVariable(_) => self.illegal("$$"),
            AstNode::Call { procedure, args } => {
                self.node(procedure);
                self.nodes(args);
            }
            AstNode::Lambda { params, body, .. } => {
                let outer = self.bound.len();
                self.bound.extend(params.iter().cloned());
                self.within(|walk| walk.node(body));
                self.bound.truncate(outer);
            }
            AstNode::Array(items) | AstNode::ArrayGroup(items) => self.nodes(items),
            AstNode::Block(items) => {
                let outer = self.bound.len();
                self.nodes(items);
                self.bound.truncate(outer);
            }
            AstNode::Object(pairs) => self.pairs(pairs),
            AstNode::ObjectTransform { input, pattern } => {
                self.node(input);
                self.within(|walk| walk.pairs(pattern));
            }
            AstNode::Conditional { condition, then_branch, else_branch } => {
                self.node(condition);
                self.node(then_branch);
                if let Some(branch) = else_branch {
                    self.node(branch);
                }
            }
            AstNode::FunctionApplication(inner) => self.within(|walk| walk.node(inner)),
            AstNode::Sort { input, terms } => {
                self.node(input);
                self.within(|walk| terms.iter().for_each(|(term, _)| walk.node(term)));
            }
            AstNode::Transform { location, update, delete } => self.within(|walk| {
                walk.node(location);
                walk.node(update);
                if let Some(delete) = delete {
                    walk.node(delete);
                }
            }),
            AstNode::Name(name) => {
                if self.inside == 0 {
                    self.illegal(name);
                }
            }
            AstNode::String(_)
            | AstNode::Number(_)
            | AstNode::Boolean(_)
            | AstNode::Null
            | AstNode::Undefined
            | AstNode::Placeholder
            | AstNode::Regex { .. }
            | AstNode::Wildcard
            | AstNode::Descendant
            | AstNode::Parent(_) => {}
        }
    }

    fn within(&mut self, walk: impl FnOnce(&mut Self)) {
        self.inside += 1;
        walk(self);
        self.inside -= 1;
    }

    fn nodes(&mut self, nodes: &[AstNode]) {
        nodes.iter().for_each(|node| self.node(node));
    }

    fn pairs(&mut self, pairs: &[(AstNode, AstNode)]) {
        for (key, value) in pairs {
            self.node(key);
            self.node(value);
        }
    }

    fn binary(&mut self, op: BinaryOp, lhs: &AstNode, rhs: &AstNode) {
        self.uses.comparisons.extend(comparison(op));
        match (op, lhs) {
            // A function may call itself by the name that is being bound.
            (BinaryOp::ColonEqual, AstNode::Variable(name)) => {
                let is_function = matches!(rhs, AstNode::Lambda { .. });
                if is_function {
                    self.bound.push(name.clone());
                }
                self.node(rhs);
                if !is_function {
                    self.bound.push(name.clone());
                }
            }
            _ => {
                self.node(lhs);
                self.node(rhs);
            }
        }
    }

    /// `$states.input.x` reads one member; any other use of `$states` reads all of them.
    fn path(&mut self, steps: &[PathStep]) {
        let outer = self.bound.len();
        for (at, step) in steps.iter().enumerate() {
            let is_states = at == 0
                && matches!(&step.node, AstNode::Variable(name) if name == "states")
                && step.stages.is_empty();
            match (is_states && !self.is_bound("states"), steps.get(1).map(|step| &step.node)) {
                (true, Some(AstNode::Name(member))) => self.states_member(member),
                (true, _) => self.uses.states = StatesUse::ALL,
                (false, _) if at == 0 => self.node(&step.node),
                (false, _) => self.within(|walk| walk.node(&step.node)),
            }
            for name in [&step.focus, &step.index_var].into_iter().flatten() {
                self.bound.push(name.clone());
            }
            for stage in &step.stages {
                match stage {
                    Stage::Filter(filter) => self.within(|walk| walk.node(filter)),
                    Stage::Index(name) => self.bound.push(name.clone()),
                    Stage::KeepArray => {}
                }
            }
        }
        self.bound.truncate(outer);
    }

    /// Reports a top-level name: an expression as a whole has no context document. AWS's message, known for names
    /// (floci-io/floci#2670).
    fn illegal(&mut self, name: &str) {
        let problem = || format!("Reference to '{name}' at the top level is not supported.");
        self.uses.problem.get_or_insert_with(problem);
    }

    fn states_member(&mut self, member: &str) {
        self.uses.members.insert(member.to_owned());
        let states = &mut self.uses.states;
        match member {
            "input" => states.input = true,
            "result" => states.result = true,
            "errorOutput" => states.error_output = true,
            "context" => states.context = true,
            _ => {}
        }
    }

    fn is_bound(&self, name: &str) -> bool {
        self.bound.iter().any(|bound| bound == name)
    }

    fn variable(&mut self, name: &str) {
        if name.is_empty() {
            if self.inside == 0 {
                self.illegal("$");
            }
            return;
        }
        if self.is_bound(name) {
            return;
        }
        if name == "states" {
            self.uses.states = StatesUse::ALL;
        } else {
            self.uses.functions.insert(name.to_owned());
            self.uses.variables.insert(name.to_owned());
        }
    }

    fn function(&mut self, name: &str) {
        self.uses.called.insert(name.to_owned());
        if !self.is_bound(name) {
            self.uses.functions.insert(name.to_owned());
        }
    }
}

/// Calls `see` with each child of a node.
pub(super) fn children<'a>(node: &'a AstNode, see: &mut dyn FnMut(&'a AstNode)) {
    match node {
        AstNode::Path { steps } => {
            for step in steps {
                see(&step.node);
                for stage in &step.stages {
                    if let Stage::Filter(filter) = stage {
                        see(filter);
                    }
                }
            }
        }
        AstNode::Binary { lhs, rhs, .. } => {
            see(lhs);
            see(rhs);
        }
        AstNode::Unary { operand, .. } => see(operand),
        AstNode::Function { args, .. } => args.iter().for_each(see),
        AstNode::Call { procedure, args } => {
            see(procedure);
            args.iter().for_each(see);
        }
        AstNode::Lambda { body, .. } => see(body),
        AstNode::Array(items) | AstNode::ArrayGroup(items) | AstNode::Block(items) => {
            items.iter().for_each(see)
        }
        AstNode::Object(pairs) => pairs.iter().for_each(|(key, value)| {
            see(key);
            see(value);
        }),
        AstNode::ObjectTransform { input, pattern } => {
            see(input);
            pattern.iter().for_each(|(key, value)| {
                see(key);
                see(value);
            });
        }
        AstNode::Conditional { condition, then_branch, else_branch } => {
            see(condition);
            see(then_branch);
            if let Some(branch) = else_branch {
                see(branch);
            }
        }
        AstNode::FunctionApplication(inner) => see(inner),
        AstNode::Sort { input, terms } => {
            see(input);
            terms.iter().for_each(|(term, _)| see(term));
        }
        AstNode::Transform { location, update, delete } => {
            see(location);
            see(update);
            if let Some(delete) = delete {
                see(delete);
            }
        }
        _ => {}
    }
}
