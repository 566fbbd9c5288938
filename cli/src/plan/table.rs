//! The answer of `flexcomm plan` for people. All times of a table are in milliseconds.

use super::buckets::Searched;
use super::{Plan, Row, Solved};
use flexcomm_optimizer::GainSource;
use std::fmt::Write;

pub(super) fn render(plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(plan, &mut out);
    out
}

fn write(plan: &Plan, out: &mut String) -> std::fmt::Result {
    let (problem, solved) = (&plan.problem, &plan.solved);
    writeln!(out, "Gradient of {} values ({}), {}.", problem.values, bytes(4.0 * problem.values as f64), plan.network)?;
    for assumption in &plan.assumed {
        writeln!(out, "Assumed: {assumption}.")?;
    }
    if solved.buckets.is_some() {
        writeln!(out, "\nOne strategy for all buckets:")?;
    }
    writeln!(out, "\n  {HEAD}")?;
    let (front, chosen) = &solved.marked;
    let shown = best(solved);
    let rows: Vec<&Row> = shown.iter().map(|i| &solved.costs[*i]).collect();
    for i in &shown {
        let mark = if Some(*i) == *chosen { ">" } else { " " };
        writeln!(out, "{mark} {}{}", row(&solved.costs[*i]), if front.contains(i) { "  *" } else { "" })?;
    }
    if shown.len() < solved.costs.len() {
        let others = match solved.costs.len() - shown.len() {
            1 => "1 row by another is".to_owned(),
            others => format!("{others} rows by others are"),
        };
        writeln!(out, "\nEach by its best collective; {others} in --json.")?;
    }
    writeln!(out, "\n* on the Pareto front of (t_comp, t_sync, 1/gain); > the choice.")?;
    if let Some(searched) = &solved.buckets {
        write_buckets(solved, searched, out)?;
    }
    if solved.choice.plan.is_none() {
        writeln!(out, "\nChoice: {} by {}.", compressor(&solved.choice), by(&solved.choice))?;
    }
    writeln!(out, "Why: {}.", solved.why)?;
    if plan.by_quality {
        write_break_even(plan, &rows, out)?;
    }
    write_basis(plan, &rows, out)
}

/// Whether the choice rests on the assumed gain; of dense by time-to-quality, whether another gain would change it.
fn write_basis(plan: &Plan, shown: &[&Row], out: &mut String) -> std::fmt::Result {
    let (costs, choice, is_alike) = (&plan.solved.costs, &plan.solved.choice, plan.solved.buckets.is_none());
    let rests: Vec<&Row> = match (choice.is_dense(), plan.by_quality) {
        (false, _) => [choice].into_iter().filter(|row| row.is_on_curve()).collect(),
        (true, true) => costs.iter().filter(|row| can_beat_dense(row) && row.is_on_curve()).collect(),
        (true, false) => costs.iter().filter(|row| row.is_on_curve()).collect(),
    };
    // A file of gains is of what keeps a share of the values.
    let can_be_given = |row: &Row| !plan.gain_given && row.of.strategy.family().has_ratio();
    let would_change = |row: &&Row| can_beat_dense(row) && row.is_on_curve() && can_be_given(row);
    match choice.is_dense() && plan.by_quality {
        true if is_alike && !costs.iter().any(can_beat_dense) => {
            writeln!(out, "Dense is best here at any gain: compression would not pay.")
        }
        true if rests.is_empty() => writeln!(out, "Dense is best here: compression would not pay."),
        true if shown.iter().any(would_change) => writeln!(
            out,
            "Under the assumed gain c^0.6 dense is best here; measured gains (--gain) above the break-even would \
             change that."
        ),
        true => writeln!(out, "Under the assumed gain c^0.6 dense is best here."),
        false if rests.is_empty() => Ok(()),
        false if rests.iter().any(|row| can_be_given(row)) => {
            writeln!(out, "This holds under the assumed gain c^0.6; give --gain for measured ones.")
        }
        false => writeln!(out, "This holds under the assumed gain c^0.6."),
    }
}

/// Positions of the rows that people are shown: each compressor and ratio by the collective that takes it the least time for the
/// progress of a dense step, and the choice.
fn best(solved: &Solved) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::new();
    for (i, row) in solved.costs.iter().enumerate() {
        match best.iter_mut().find(|b| solved.costs[**b].same_compression(row)) {
            Some(known) if row.t_quality_s < solved.costs[*known].t_quality_s => *known = i,
            Some(_) => {}
            None => best.push(i),
        }
    }
    best.extend(solved.marked.1.filter(|chosen| !best.contains(chosen)));
    best
}

/// The gain above which time to quality is less than dense's; infinite where there is none.
fn needed(row: &Row) -> f64 {
    row.break_even_gain.unwrap_or(f64::INFINITY)
}

fn can_beat_dense(row: &Row) -> bool {
    !row.is_dense() && needed(row) < 1.0
}

/// Of the table's rows, those that a gain would make better than dense, and the compressors that none would by any collective.
fn write_break_even(plan: &Plan, shown: &[&Row], out: &mut String) -> std::fmt::Result {
    let costs = &plan.solved.costs;
    let alike = if plan.solved.buckets.is_some() { " in all buckets alike" } else { "" };
    let can: Vec<&Row> = shown.iter().copied().filter(|row| can_beat_dense(row)).collect();
    if !can.is_empty() {
        writeln!(out, "Break-even{alike}, the gain above which time to quality is less than dense's:")?;
    }
    for row in can {
        let now = if row.gain_source == GainSource::Profile { "given" } else { "assumed" };
        let (needed, gain) = (digits(needed(row)), digits(row.of.gain.get()));
        writeln!(out, "  {:<WIDTH$} {:<15} {needed} ({now}: {gain})", compressor(row), by(row))?;
    }
    let never = |row: &&Row| !costs.iter().any(|other| row.same_compression(other) && can_beat_dense(other));
    let never: Vec<&Row> = shown.iter().copied().filter(|row| !row.is_dense()).filter(never).collect();
    if !never.is_empty() {
        let names: Vec<String> = never.into_iter().map(compressor).collect();
        writeln!(out, "At no gain would {}{alike} beat dense: a step takes longer.", names.join(", "))?;
    }
    Ok(())
}

/// A gain to four digits: above 0, it is not shown as 0.
fn digits(gain: f64) -> String {
    if gain < 1e-4 { "<0.0001".to_owned() } else { format!("{gain:.4}") }
}

/// Plans that are shown; the others are in --json.
const SHOWN: usize = 5;

fn write_buckets(solved: &Solved, searched: &Searched, out: &mut String) -> std::fmt::Result {
    let (ms, seed) = (searched.took.as_secs_f64() * 1e3, searched.seed);
    if searched.plans.is_empty() {
        return writeln!(
            out,
            "\nA strategy for each bucket: no plan of several strategies is admitted (NSGA-II, seed {seed}, {ms:.1} ms)."
        );
    }
    writeln!(out, "\nA strategy for each bucket, by NSGA-II (seed {seed}, {ms:.1} ms):")?;
    writeln!(out, "\n  {PLAN_HEAD}")?;
    for plan in searched.plans.iter().take(SHOWN) {
        let mark = if plan.plan == solved.choice.plan { ">" } else { " " };
        let text = plan.plan.as_ref().map(ToString::to_string).unwrap_or_default();
        writeln!(out, "{mark} {} {}", numbers(plan), text.replace("+ef(vanilla)", ""))?;
    }
    let Some(plan) = &solved.choice.plan else { return Ok(()) };
    writeln!(out, "\n  {:<24} {:>14} strategy", "buckets", "values")?;
    for (name, values, strategy) in searched.runs(plan) {
        writeln!(out, "  {name:<24} {values:>14} {strategy}")?;
    }
    writeln!(out, "\nChoice: {plan}")
}

/// Columns of a compressor's name.
const WIDTH: usize = 20;

const HEAD: &str = "compressor           collective         t_comp ms    t_sync ms    t_step ms    gain   quality ms";

const PLAN_HEAD: &str = "   t_comp ms    t_sync ms    t_step ms    gain   quality ms plan, by bucket";

/// `topk at 0.011`, `qsgd(s=7,norm=max)`: error feedback is the rule, and what has none says so.
fn compressor(r: &Row) -> String {
    if r.is_dense() {
        return "dense".into();
    }
    let spec = r.of.strategy.spec();
    let family = r.of.strategy.family().to_string().replace("+ef(vanilla)", "");
    let open = open_name(&family);
    let name = if open == family { family } else { format!("{open} at {}", (r.cr * 1e6).round() / 1e6) };
    if spec.is_biased_without_memory() || spec.is_unbiased_without_memory() { format!("{name} (no ef)") } else { name }
}

/// `topk` of `topk(k=*)+ef(vanilla)`.
fn open_name(family: &str) -> String {
    family.replace("+ef(vanilla)", "").replace("(k=*)", "").replace("k=*,", "")
}

fn by(r: &Row) -> String {
    let collective = r.of.strategy.collective();
    r.of.strategy.selection().map_or(collective.to_string(), |selection| format!("{collective}:{selection}"))
}

fn row(r: &Row) -> String {
    format!("{:<WIDTH$} {:<15} {}", compressor(r), by(r), numbers(r))
}

fn numbers(r: &Row) -> String {
    let ms = |s: f64| format!("{:.3}", s * 1e3);
    format!(
        "{:>12} {:>12} {:>12} {:>7.4} {:>12}",
        ms(r.of.t_comp.get()),
        ms(r.of.t_sync.get()),
        ms(r.t_step_s()),
        r.of.gain.get(),
        ms(r.t_quality_s),
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
