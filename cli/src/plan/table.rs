//! The answer of `flexcomm plan` for people. All times of a table are in milliseconds.

use super::buckets::Searched;
use super::{Plan, Row};
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
    if plan.buckets.is_some() {
        writeln!(out, "\nOne ratio for all buckets:")?;
    }
    writeln!(out, "\n  {HEAD}")?;
    let (front, chosen) = &plan.marked;
    for (i, candidate) in plan.costs.iter().enumerate() {
        let mark = if Some(i) == *chosen { ">" } else { " " };
        writeln!(out, "{mark} {}{}", row(candidate), if front.contains(&i) { "  *" } else { "" })?;
    }
    match &plan.buckets {
        None => write_front(plan, out)?,
        Some(searched) => write_buckets(plan, searched, out)?,
    }
    writeln!(out, "Why: {}.", plan.why)?;
    if plan.choice.cr == 1.0 {
        writeln!(out, "Dense is best here: compression would not pay.")?;
    }
    Ok(())
}

fn write_front(plan: &Plan, out: &mut String) -> std::fmt::Result {
    writeln!(out, "\n* on the Pareto front of (t_comp, t_sync, 1/gain); > the choice.")?;
    let front: Vec<String> = plan.front.iter().map(|r| format!("{} at {}", r.collective, r.cr)).collect();
    writeln!(out, "Front: {}.", front.join(", "))?;
    writeln!(out, "\nChoice: {} at CR {}.", plan.choice.collective, plan.choice.cr)
}

fn write_buckets(plan: &Plan, searched: &Searched, out: &mut String) -> std::fmt::Result {
    let ms = searched.took.as_secs_f64() * 1e3;
    writeln!(
        out,
        "\nA ratio per bucket, by {} ({}): {ms:.1} ms, front of {} plans.",
        searched.solution.solver.as_str(),
        searched.why(),
        plan.front.len()
    )?;
    writeln!(out, "\n  {HEAD}\n> {}", row(&plan.choice))?;
    writeln!(out, "\n  {:<24} {:>14} {:>8}", "bucket", "values", "CR")?;
    let crs = plan.choice.bucket_crs.iter().flatten();
    for ((name, values), cr) in searched.names.iter().zip(&searched.values).zip(crs) {
        writeln!(out, "  {name:<24} {values:>14} {cr:>8}")?;
    }
    let cr = plan.choice.cr;
    writeln!(out, "\nChoice: {}, {} of all values kept.", plan.choice.collective, percent(cr))
}

const HEAD: &str = "collective        CR    t_comp ms    t_sync ms    t_step ms    gain  ms per gain";

fn row(r: &Row) -> String {
    let ms = |s: f64| format!("{:.3}", s * 1e3);
    format!(
        "{:<11} {:>8} {:>12} {:>12} {:>12} {:>7.4} {:>12}",
        r.collective,
        (r.cr * 1e6).round() / 1e6,
        ms(r.t_comp_s),
        ms(r.t_sync_s),
        ms(r.t_step_s),
        r.gain,
        ms(r.t_step_s / r.gain),
    )
}

fn percent(share: f64) -> String {
    format!("{} %", (share * 1e6).round() / 1e4)
}

fn bytes(count: f64) -> String {
    match count {
        c if c >= 1e9 => format!("{:.2} GB", c / 1e9),
        c if c >= 1e6 => format!("{:.2} MB", c / 1e6),
        c if c >= 1e3 => format!("{:.2} kB", c / 1e3),
        c => format!("{c} B"),
    }
}
