"""What `docs/performance.md` says: a table for each source, and what is not half."""

import collections
from typing import Any

from benchmarks._tables import table
from benchmarks.pages.registry import figure
from benchmarks.published import SOURCES

FLOAT16, BFLOAT16 = "autocast float16", "autocast bfloat16"
BY_HAND, ADAPTER = "by hand float16", "adapter float16"
BY_HAND_BFLOAT16 = "by hand bfloat16"


@figure("published/whole")
def _(results: list[dict[str, Any]]) -> str:
    """How many models have all products half, and which fail."""
    ran = [r for r in results if "error" not in r and "error" not in r["recipes"][FLOAT16]]
    whole = [r for r in ran if all_half(r["recipes"][FLOAT16])]
    text = f"**{len(whole)} of {len(results)} models have all products half**"
    return text + " and " * bool(broken(results)) + ", ".join(broken(results))


@figure("published/not-whole")
def _(results: list[dict[str, Any]]) -> str:
    """The models with a product that is not half, and how many of theirs are."""
    ran = [r["title"] for r in results if "recipes" in r and "error" not in r["recipes"][FLOAT16]]
    counted = {r["title"]: r["recipes"][FLOAT16] for r in results if r["title"] in ran}
    rest = sorted(
        (counts["half"] / max(counts["products"], 1), title)
        for title, counts in counted.items()
        if not all_half(counts)
    )
    return "; ".join(
        f"{title} ({counted[title]['half']} of {counted[title]['products']})" for _, title in rest
    )


@figure("published/tables")
def _(results: list[dict[str, Any]]) -> str:
    text = ""
    for source, (title, _) in SOURCES.items():
        found = [result for result in results if result["source"] == source]
        if found:
            versions = next((r["versions"] for r in found if "versions" in r), {})
            named = ", ".join(f"{package} {version}" for package, version in versions.items())
            text += f"\n### {title}\n\n" + f"{named}.\n\n" * bool(named)
            text += table_of(found) + notes(found)
    return text


def table_of(results: list[dict[str, Any]]) -> str:
    columns = {BY_HAND: "by hand", ADAPTER: "adapter"}
    used = [c for c in columns if any(c in r.get("recipes", ()) for r in results)]
    has_bfloat16 = any(BY_HAND_BFLOAT16 in r.get("recipes", ()) for r in results)
    headers = ["model", "products", "half", "float16", "bfloat16"]
    for column in used:
        headers += [f"{columns[column]}: half", f"{columns[column]}: float16"]
        if column == BY_HAND and has_bfloat16:
            headers.append("by hand: bfloat16")
    rows = []
    for result in results:
        recipes = result.get("recipes", {})
        row = [result["title"], str(recipes.get("float32", {}).get("products", ""))]
        row += [half_of(recipes), error_of(recipes, FLOAT16), error_of(recipes, BFLOAT16)]
        for column in used:
            row += [number_half(recipes, column), error_of(recipes, column)]
            if column == BY_HAND and has_bfloat16:
                row.append(error_of(recipes, BY_HAND_BFLOAT16))
        rows.append(row)
    return table(headers, rows)


def half_of(recipes: dict[str, Any]) -> str:
    numbers = [number_half(recipes, recipe) for recipe in (FLOAT16, BFLOAT16)]
    return " / ".join(dict.fromkeys(filter(None, numbers)))


def number_half(recipes: dict[str, Any], recipe: str) -> str:
    found = recipes.get(recipe, {})
    if "half" not in found:
        return ""
    share = "all" if all_half(found) else str(found["half"])
    more = found["products"] - recipes["float32"]["products"]
    return share + (f" (of {found['products']})" if more else "")


def all_half(found: dict[str, Any]) -> bool:
    return 0 < found["products"] == found["half"]


def error_of(recipes: dict[str, Any], recipe: str) -> str:
    if recipe not in recipes:
        return ""
    found = recipes[recipe]
    if "error" in found:
        return "fails"
    if not found["finite"]:
        return "not finite"
    lowered = recipe not in (BFLOAT16, BY_HAND_BFLOAT16) and found["scale"] < 4096
    return f"{found['gradient_error']:.1e}" + f" (scale {found['scale']:.0f})" * lowered


def notes(results: list[dict[str, Any]]) -> str:
    """Returns a line for all that is not half, or failed, with its reason."""
    lines = []
    for result in results:
        if "error" in result:
            lines.append(f"- {result['title']}: not run: {result['error']}")
            continue
        for recipe, found in result["recipes"].items():
            if "error" in found:
                lines.append(f"- {result['title']}, {recipe}: {found['error']}")
        found = result["recipes"][FLOAT16]
        if found.get("others"):
            lines.append(f"- {result['title']}, not half: {why(found)}.")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def why(found: dict[str, Any]) -> str:
    """Returns why products are not half: the planner's reasons, by their number in the program."""
    numbers: collections.Counter[str] = collections.Counter()
    places: dict[str, str] = {}
    for row in found["reasons"]:
        numbers[row["why"]] += row["times"]
        places.setdefault(row["why"], f"`{row['operation']}` at {row['source']}")
    if not numbers:
        place = next(iter(found["others"]))
        return f"only the backward pass, {place.removesuffix(' ()')}"
    return "; ".join(f"{reason} ({places[reason]})" for reason in numbers)


def broken(results: list[dict[str, Any]]) -> list[str]:
    """Returns what is no gradient where float32 has one: the defects."""
    found = []
    for result in results:
        for recipe in (FLOAT16, BFLOAT16):
            run = result.get("recipes", {}).get(recipe, {})
            if "error" in run or not run.get("finite", True):
                found.append(f"{result['title']} fails under {recipe}")
    return found
