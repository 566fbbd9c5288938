//! The answer of `flexcomm plan` for people.

use super::Plan;
use flexcomm_domain::Seconds;
use flexcomm_optimizer::Evaluated;
use std::fmt::Write;

pub(super) fn render(plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(plan, &mut out);
    out
}

fn write(plan: &Plan, out: &mut String) -> std::fmt::Result {
    let problem = &plan.problem;
    writeln!(out, "Gradient of {} values ({}), {}.", problem.values, bytes(4.0 * problem.values as f64), plan.network)?;
    for assumption in &plan.assumed {
        writeln!(out, "Assumed: {assumption}.")?;
    }
    let solution = &plan.solution;
    writeln!(out, "\n  {HEAD}")?;
    for (i, candidate) in solution.candidates.iter().enumerate() {
        let front = solution.front.contains(&i);
        let mark = if i == solution.choice.index { ">" } else { " " };
        writeln!(out, "{mark} {}{}", row(candidate), if front { "  *" } else { "" })?;
    }
    writeln!(out, "\n* on the Pareto front of (t_comp, t_sync, 1/gain); > the choice.")?;
    let front: Vec<String> = solution.front.iter().map(|&i| solution.candidates[i].strategy.to_string()).collect();
    writeln!(out, "Front: {}.", front.join(", "))?;
    let chosen = solution.chosen();
    writeln!(out, "\nChoice: {} at CR {}.", chosen.strategy.collective(), chosen.strategy.cr())?;
    writeln!(out, "Why: {}.", solution.choice.why)?;
    if chosen.strategy.is_dense() {
        writeln!(out, "Dense is best here: compression would not pay.")?;
    }
    Ok(())
}

const HEAD: &str = "collective       CR       t_comp       t_sync       t_step    gain  t_step/gain";

fn row(e: &Evaluated) -> String {
    format!(
        "{:<11} {:>7} {:>12} {:>12} {:>12} {:>7.4} {:>12}",
        e.strategy.collective(),
        e.strategy.cr().get(),
        e.t_comp.to_string(),
        e.t_sync.to_string(),
        e.t_step.to_string(),
        e.gain.get(),
        Seconds::new(e.time_per_gain()).map_or_else(|_| "-".to_owned(), |s| s.to_string()),
    )
}

fn bytes(count: f64) -> String {
    match count {
        c if c >= 1e9 => format!("{:.2} GB", c / 1e9),
        c if c >= 1e6 => format!("{:.2} MB", c / 1e6),
        c if c >= 1e3 => format!("{:.2} kB", c / 1e3),
        c => format!("{c} B"),
    }
}
