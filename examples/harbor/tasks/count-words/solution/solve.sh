#!/bin/sh
wc -w <text.txt >answer.txt
