#!/usr/bin/env python3
"""Writes facts.jsonl: short questions and answers that follow a pattern, in English and Chinese.

    python3 make_facts.py > facts.jsonl

The free-form dialogues in chat.jsonl are written by hand.
"""
import json

CAPITALS = [  # country, capital, country and capital in Chinese
    ("China", "Beijing", "中国", "北京"),
    ("France", "Paris", "法国", "巴黎"),
    ("Japan", "Tokyo", "日本", "东京"),
    ("Germany", "Berlin", "德国", "柏林"),
    ("Italy", "Rome", "意大利", "罗马"),
    ("Spain", "Madrid", "西班牙", "马德里"),
    ("Egypt", "Cairo", "埃及", "开罗"),
    ("Russia", "Moscow", "俄罗斯", "莫斯科"),
    ("Greece", "Athens", "希腊", "雅典"),
    ("Thailand", "Bangkok", "泰国", "曼谷"),
    ("Kenya", "Nairobi", "肯尼亚", "内罗毕"),
    ("Canada", "Ottawa", "加拿大", "渥太华"),
    ("Australia", "Canberra", "澳大利亚", "堪培拉"),
    ("Norway", "Oslo", "挪威", "奥斯陆"),
    ("Vietnam", "Hanoi", "越南", "河内"),
    ("Peru", "Lima", "秘鲁", "利马"),
]
COLOURS = [  # "what" in English, colour, both in Chinese
    ("grass", "green", "草", "绿色"),
    ("snow", "white", "雪", "白色"),
    ("coal", "black", "煤", "黑色"),
    ("a ripe banana", "yellow", "熟香蕉", "黄色"),
    ("a ripe tomato", "red", "熟番茄", "红色"),
    ("the clear sky", "blue", "晴天", "蓝色"),
    ("chocolate", "brown", "巧克力", "棕色"),
    ("a carrot", "orange", "胡萝卜", "橙色"),
]
OPPOSITES = [
    ("big", "small", "大", "小"),
    ("hot", "cold", "热", "冷"),
    ("long", "short", "长", "短"),
    ("fast", "slow", "快", "慢"),
    ("day", "night", "白天", "黑夜"),
    ("up", "down", "上", "下"),
    ("open", "closed", "开", "关"),
    ("early", "late", "早", "晚"),
]
LEGS = [
    ("dog", "four", "狗", "四"),
    ("cat", "four", "猫", "四"),
    ("horse", "four", "马", "四"),
    ("chicken", "two", "鸡", "两"),
    ("duck", "two", "鸭子", "两"),
    ("ant", "six", "蚂蚁", "六"),
    ("bee", "six", "蜜蜂", "六"),
    ("spider", "eight", "蜘蛛", "八"),
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
DAYS_ZH = ["星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日"]
MONTHS = "January February March April May June July August September October November December".split()
MONTHS_ZH = ["一月", "二月", "三月", "四月", "五月", "六月", "七月", "八月", "九月", "十月", "十一月", "十二月"]


def pairs():
    """All questions with their answers."""
    for country, city, country_zh, city_zh in CAPITALS:
        answer = f"The capital of {country} is {city}."
        yield f"What is the capital of {country}?", answer
        yield f"Which city is the capital of {country}?", answer
        yield f"{city} is the capital of which country?", f"{city} is the capital of {country}."
        answer = f"{country_zh}的首都是{city_zh}。"
        yield f"{country_zh}的首都是哪里？", answer
        yield f"哪座城市是{country_zh}的首都？", answer
        yield f"{city_zh}是哪个国家的首都？", f"{city_zh}是{country_zh}的首都。"
    for thing, colour, thing_zh, colour_zh in COLOURS:
        yield f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."
        yield f"{thing_zh}是什么颜色的？", f"{thing_zh}是{colour_zh}的。"
    for a, b, a_zh, b_zh in OPPOSITES:
        for x, y, x_zh, y_zh in ((a, b, a_zh, b_zh), (b, a, b_zh, a_zh)):
            yield f'What is the opposite of "{x}"?', f'The opposite of "{x}" is "{y}".'
            yield f"“{x_zh}”的反义词是什么？", f"“{x_zh}”的反义词是“{y_zh}”。"
    for animal, legs, animal_zh, legs_zh in LEGS:
        article = "An" if animal[0] in "aeiou" else "A"
        yield f"How many legs does {article.lower()} {animal} have?", f"{article} {animal} has {legs} legs."
        yield f"{animal_zh}有几条腿？", f"{animal_zh}有{legs_zh}条腿。"
    for names, names_zh, unit, unit_zh in ((DAYS, DAYS_ZH, "day", "天"), (MONTHS, MONTHS_ZH, "month", "个月")):
        for i, name in enumerate(names):
            following, following_zh = names[(i + 1) % len(names)], names_zh[(i + 1) % len(names)]
            yield f"Which {unit} comes after {name}?", f"{following} comes after {name}."
            yield f"{names_zh[i]}的下一{unit_zh}是什么？", f"{names_zh[i]}的下一{unit_zh}是{following_zh}。"
    for a in range(1, 6):
        for b in range(1, 6):
            yield f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
            yield f"Add {a} and {b}.", f"{a} + {b} = {a + b}."
            yield f"{a} 加 {b} 等于几？", f"{a} 加 {b} 等于 {a + b}。"
            yield f"{a} 加 {b} 是多少？", f"{a} 加 {b} 等于 {a + b}。"


for question, answer in pairs():
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    print(json.dumps({"messages": messages}, ensure_ascii=False))
